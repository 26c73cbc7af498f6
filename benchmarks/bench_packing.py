"""How fast is packing, how full are its rows, and how much does a new key change?

    python benchmarks/bench_packing.py            about 45 seconds on one core

For each length of row: the documents per second
of `pack` and `count_rows` on one core, the fill over 8 windows, and the shares of pairs that come back under
another key. `first_call_seconds` is what the first call of a process takes, loading the kernels included.
Lengths: lognormal(6.2, 1.1), as on the web; and the Python files of the standard library at 4 bytes per token.
"""

from __future__ import annotations

import bisect
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from _machine import print_result

from penstock.packing import Packing, PackingLedger, PackingSettings, count_rows, make_ledger, pack

Lengths = npt.NDArray[np.int64]
Figures = dict[str, float | int]

ROW_LENGTHS = (2048, 4096, 8192, 32768)
NUM_WINDOWS = 8
ROWS_PER_WINDOW = 16_384
MAX_WINDOW_TOKENS = 256 * 10**6
REPEATS = 5
BYTES_PER_TOKEN = 4

FIRST_CALL = """
import time, numpy as np
from penstock.packing import PackingSettings, count_rows, pack
started = time.perf_counter()
pack(np.array([9, 3]), PackingSettings(length=8), key=0)
count_rows(np.array([9, 3]), PackingSettings(length=8))
print(time.perf_counter() - started)
"""


def time_first_call() -> Figures:
    command = [sys.executable, "-c", FIRST_CALL]
    seconds = [float(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(5)]
    return {"first_call_seconds": round(min(seconds), 4)}


def fill_window(draw: Callable[[int], Lengths], num_tokens: int) -> Lengths:
    """As many drawn documents as `num_tokens` hold, none of them cut."""
    lengths = np.maximum(1, draw(num_tokens // 500))
    while lengths.sum() < num_tokens:
        lengths = np.concatenate([lengths, np.maximum(1, draw(num_tokens // 500))])
    return lengths[: np.searchsorted(np.cumsum(lengths), num_tokens, side="right")]


def draw_web(num_documents: int, rng: np.random.Generator) -> Lengths:
    return rng.lognormal(6.2, 1.1, num_documents).astype(np.int64)


def read_library_lengths() -> Lengths:
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    sizes = [file.stat().st_size for file in files if "site-packages" not in file.parts]
    return np.array(sizes, dtype=np.int64) // BYTES_PER_TOKEN


def draw_library(num_documents: int, rng: np.random.Generator, lengths: Lengths) -> Lengths:
    """Files drawn again and again, each a little longer or shorter (10 %) than it is."""
    return (rng.choice(lengths, num_documents) * rng.normal(1.0, 0.1, num_documents)).astype(np.int64)


def best_seconds(call: Callable[[], object]) -> float:
    durations = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        call()
        durations.append(time.perf_counter() - started)
    return min(durations)


def list_neighbours(packing: Packing, distance: int) -> Lengths:
    """Documents so many pieces apart in one row, as one number per pair."""
    rows = np.repeat(np.arange(packing.num_rows), np.diff(packing.row_offsets))
    is_shared = rows[distance:] == rows[:-distance]
    one, other = packing.documents[distance:][is_shared], packing.documents[:-distance][is_shared]
    return np.maximum(one, other) << 32 | np.minimum(one, other)


def measure_repeats(lengths: Lengths, settings: PackingSettings) -> Figures:
    packings = [pack(lengths, settings, key) for key in (0, 1)]
    neighbours = [list_neighbours(packing, 1) for packing in packings]
    distances = range(1, int(np.diff(packings[0].row_offsets).max()))
    pairs = [np.concatenate([list_neighbours(packing, far) for far in distances]) for packing in packings]
    return {
        "neighbours_repeated": round(float(np.isin(*neighbours).mean()), 4),
        "row_mates_repeated": round(float(np.isin(*pairs).mean()), 4),
    }


def measure_windows(windows: list[Lengths], settings: PackingSettings) -> Figures:
    num_documents = sum(window.size for window in windows)
    pack_seconds = sum(best_seconds(partial(pack, window, settings, 7)) for window in windows)
    count_seconds = sum(best_seconds(partial(count_rows, window, settings)) for window in windows)
    total = sum((make_ledger(window, settings) for window in windows), start=PackingLedger())
    return {
        "num_windows": len(windows),
        "documents_per_window": num_documents // len(windows),
        "pack_documents_per_second": round(num_documents / pack_seconds),
        "count_rows_documents_per_second": round(num_documents / count_seconds),
        "fill": round(total.fill, 6),
        "num_rows": total.num_rows,
        "padding_tokens": total.padding_tokens,
        "tokens_lost": total.num_tokens - total.tokens_placed,
        "share_of_documents_split": round(total.num_split / total.num_documents, 4),
    }


def pack_plainly(lengths: Lengths, length: int) -> int:
    """Best-fit-decreasing as one would write it in Python: rooms in a sorted list."""
    rooms: list[int] = []
    num_rows = int((lengths // length).sum())
    for size in sorted((lengths % length).tolist(), reverse=True):
        place = bisect.bisect_left(rooms, size)
        room = rooms.pop(place) if place < len(rooms) else length
        num_rows += room == length and size > 0
        if 0 < room - size < length:
            bisect.insort(rooms, room - size)
    return num_rows


def compare_with_plain_python(lengths: Lengths, settings: PackingSettings) -> Figures:
    started = time.perf_counter()
    num_rows = pack_plainly(lengths, settings.length)
    seconds = time.perf_counter() - started
    assert num_rows == count_rows(lengths, settings)
    return {
        "plain_python_documents_per_second": round(lengths.size / seconds),
        "pack_times_faster": round(seconds / best_seconds(partial(pack, lengths, settings, 7)), 1),
        "count_rows_times_faster": round(seconds / best_seconds(partial(count_rows, lengths, settings)), 1),
    }


def measure_length(length: int, library: Lengths) -> dict[str, Figures]:
    settings, rng = PackingSettings(length=length), np.random.default_rng(length)
    num_tokens = min(ROWS_PER_WINDOW * length, MAX_WINDOW_TOKENS)
    web = [fill_window(lambda n: draw_web(n, rng), num_tokens) for _ in range(NUM_WINDOWS)]
    code = [fill_window(lambda n: draw_library(n, rng, library), num_tokens) for _ in range(NUM_WINDOWS)]
    return {
        "web": measure_windows(web, settings) | measure_repeats(web[0], settings),
        "web_max_64_documents": measure_windows(web, PackingSettings(length=length, max_documents=64)),
        "library_with_jitter": measure_windows(code, settings),
        "library_as_it_is": measure_windows([library], settings),
        "against_plain_python": compare_with_plain_python(web[0], settings),
    }


def main() -> None:
    library = read_library_lengths()
    settings = {
        "rows_per_window": ROWS_PER_WINDOW,
        "max_window_tokens": MAX_WINDOW_TOKENS,
        "repeats_best_of": REPEATS,
        "library_files": library.size,
        "library_tokens": int(library.sum()),
    }
    by_length = {f"{length:,} tokens": measure_length(length, library) for length in ROW_LENGTHS}
    print_result("How fast is packing, and how full are its rows?", settings, time_first_call() | by_length)


if __name__ == "__main__":
    main()

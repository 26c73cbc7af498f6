"""How fast is `ds.read` beside numpy's own gather, and what does checking cost?

Random batches of 32 rows of 2048 uint16, converted to int64 in a reused buffer, from 1 GB in the page
cache; `Dataset.read` over several shards against `out[...] = memmap[indices]` over one file. The two
take turns in short rounds, so that a noisy machine slows both; the ratio is of the medians.

The cost of checking is the first pass over freshly mapped, cached shards, window by window, with
check="window" against check="never"; then the same random batches with both. Blocks are checked ahead
on a second core, so the processor time of both passes, all threads, stands beside their wall time.
Two floors to judge them by: numpy's own first pass over a fresh map, and the checksums alone.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import crc32c
import numpy as np
from _machine import print_result

import penstock

ROW, BATCH = 2048, 32
WINDOW = 1024  # rows: 4 MiB
BLOCK_BYTES = 512 << 10


def make_files(folder: Path, num_rows: int) -> tuple[Path, Path]:
    """The same rows as a dataset and as a bare file."""
    rng = np.random.default_rng(0)
    with (
        penstock.DatasetWriter(folder / "dataset", {"tokens": f"uint16[{ROW}]"}) as writer,
        open(folder / "bare.bin", "wb") as bare,
    ):
        for begin in range(0, num_rows, 4096):
            rows = rng.integers(0, 2**16, (min(4096, num_rows - begin), ROW), dtype=np.uint16)
            writer.write_batch({"tokens": rows})
            rows.tofile(bare)
    return folder / "dataset", folder / "bare.bin"


def seconds_per_batch(read: Callable[[np.ndarray], object], batches: list[np.ndarray]) -> float:
    begin = time.perf_counter()
    for indices in batches:
        read(indices)
    return (time.perf_counter() - begin) / len(batches)


def compare_gathers(dataset: Path, bare: Path, num_rows: int, rounds: int) -> dict[str, float]:
    rng = np.random.default_rng(1)
    out = np.empty((BATCH, ROW), np.int64)
    stored = np.memmap(bare, np.uint16, "r").reshape(-1, ROW)
    checked, trusted = penstock.open(dataset), penstock.open(dataset, check="never")

    def gather(indices: np.ndarray) -> None:
        out[...] = stored[indices]

    readers = {
        "numpy": gather,
        "penstock": lambda indices: checked.read(indices, out={"tokens": out}),
        "penstock, unchecked": lambda indices: trusted.read(indices, out={"tokens": out}),
    }
    for reader in readers.values():  # everything mapped and checked
        for begin in range(0, num_rows, BATCH):
            reader(np.arange(begin, min(begin + BATCH, num_rows))) if begin + BATCH <= num_rows else None
    times: dict[str, list[float]] = {name: [] for name in readers}
    order = list(readers)
    for _ in range(rounds):
        order.append(order.pop(0))  # each is first as often as last
        for name in order:  # other rows for each: the ones of the reader before are in the processor's cache
            batches = [rng.integers(0, num_rows, BATCH) for _ in range(200)]
            times[name].append(seconds_per_batch(readers[name], batches))
    medians = {name: statistics.median(values) for name, values in times.items()}
    figures = {f"{name}, Mtok/s": BATCH * ROW / value / 1e6 for name, value in medians.items()}
    figures["share of numpy's gather"] = medians["numpy"] / medians["penstock"]
    figures["cost of checking afterwards, %"] = 100 * (medians["penstock"] / medians["penstock, unchecked"] - 1)
    return figures


def first_pass(dataset: Path, check: str, num_rows: int, out: np.ndarray) -> None:
    """One pass in order over a freshly opened dataset, a storage window at a time."""
    ds = penstock.open(dataset, check=check)
    for row in range(0, num_rows - len(out) + 1, len(out)):
        ds.read(np.arange(row, row + len(out)), out={"tokens": out})


def numpy_first_pass(bare: Path, num_rows: int, out: np.ndarray) -> None:
    """The same pass over a fresh map by numpy's own conversion, which needs no gather."""
    stored = np.memmap(bare, np.uint16, "r").reshape(-1, ROW)
    for row in range(0, num_rows - len(out) + 1, len(out)):
        out[...] = stored[row : row + len(out)]


def checksums_alone(bare: Path) -> None:
    """CRC32C of every block of a fresh map, in one thread."""
    stored = np.memmap(bare, np.uint8, "r")
    for begin in range(0, len(stored), BLOCK_BYTES):
        crc32c.crc32c(stored[begin : begin + BLOCK_BYTES])


def cost_of_first_check(dataset: Path, bare: Path, num_rows: int, rounds: int) -> dict[str, float]:
    out = np.zeros((WINDOW, ROW), np.int64)
    passes = {
        "checked": lambda: first_pass(dataset, "window", num_rows, out),
        "unchecked": lambda: first_pass(dataset, "never", num_rows, out),
        "by numpy": lambda: numpy_first_pass(bare, num_rows, out),
        "checksums alone": lambda: checksums_alone(bare),
    }
    wall: dict[str, list[float]] = {name: [] for name in passes}
    processor: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(rounds):
        for name, run in passes.items():
            begin, begin_processor = time.perf_counter(), time.process_time()
            run()
            wall[name].append(time.perf_counter() - begin)
            processor[name].append(time.process_time() - begin_processor)
    walls = {name: statistics.median(values) for name, values in wall.items()}
    processors = {name: statistics.median(values) for name, values in processor.items()}
    figures = {f"first pass {name}, s": value for name, value in walls.items()}
    figures |= {f"first pass {name}, processor s": processors[name] for name in ("checked", "unchecked")}
    figures["cost of checking on the first pass, %"] = 100 * (walls["checked"] / walls["unchecked"] - 1)
    figures["the same in processor time, %"] = 100 * (processors["checked"] / processors["unchecked"] - 1)
    return figures


def time_to_open(folder: Path, num_shards: int) -> dict[str, float]:
    with penstock.DatasetWriter(folder / "many", {"tokens": "uint16[*]"}, shard_bytes=1) as writer:
        for _ in range(num_shards):
            writer.write({"tokens": [1, 2, 3]})
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        penstock.open(folder / "many")
        times.append(time.perf_counter() - begin)
    return {f"open {num_shards:,} shards, ms": 1000 * statistics.median(times)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    num_rows = int(arguments.gigabytes * 1e9) // (2 * ROW)
    folder = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    try:
        dataset, bare = make_files(folder, num_rows)
        figures: dict[str, float] = compare_gathers(dataset, bare, num_rows, arguments.rounds)
        figures |= cost_of_first_check(dataset, bare, num_rows, arguments.rounds)
        figures |= time_to_open(folder, 1000)
    finally:
        shutil.rmtree(folder)
    settings = {"rows": num_rows, "row": f"{ROW} uint16", "batch": BATCH, "out": "int64", "rounds": arguments.rounds}
    print_result("Dataset.read against numpy's gather", settings, figures, "crc32c")


if __name__ == "__main__":
    main()

"""How fast is each loop of the C library: the one for this processor, and the one for any of its kind?

    python benchmarks/bench_kernels.py            about a minute on one core

Each kernel runs on what a batch, a window or a block of samples gives it. Every figure is the best of many calls, in
processor time, each library in a process of its own, in turns. The ratio is how much faster the first library is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from _machine import print_result

TURNS, SECONDS = 3, 0.15
RNG = np.random.default_rng(0)


def kernels() -> Iterator[tuple[str, Callable[[], object]]]:
    yield from reading()
    yield from ordering()
    yield from packing()
    yield from composing()


def reading() -> Iterator[tuple[str, Callable[[], object]]]:
    from penstock.shards import _kernels

    num_shards, num_samples, length = 16, 512, 2048
    shards = [RNG.integers(0, 50_000, (num_samples, length), np.uint16) for _ in range(num_shards)]
    offsets = [np.arange(num_samples + 1) * length for _ in range(num_shards)]
    table = np.zeros((num_shards, 8), np.int64)
    for row, values, edges in zip(table, shards, offsets, strict=True):
        row[:] = [-1, 0, values.ctypes.data, edges.ctypes.data, values.size, 2, 0, 0]
    starts = np.arange(num_shards + 1) * num_samples
    indices = RNG.integers(0, starts[-1], 32)
    many = RNG.integers(0, starts[-1], 4096)
    ids, same, like = np.empty((32, length), np.int64), np.empty((32, length * 2), np.uint8), np.empty(0, np.uint16)
    single = np.empty((1, length), np.int64)
    yield "gather 32 x 2048 uint16 to int64", lambda: _kernels.gather(table, starts, 2, indices, 0, ids, like)
    byte = np.empty(0, np.uint8)
    yield "gather 32 x 2048 uint16", lambda: _kernels.gather(table, starts, 2, indices, 0, same, byte)
    yield "gather 1 x 2048 uint16 to int64", lambda: _kernels.gather(table, starts, 2, indices[:1], 0, single, like)
    for dtype in ("int32", "float32"):
        out = np.empty((32, length), dtype)
        name = f"gather 32 x 2048 uint16 to {dtype}"
        yield name, lambda out=out: _kernels.gather(table, starts, 2, indices, 0, out, like)
    scalars = np.empty((4096, 1), np.int64)
    small = np.empty(0, np.uint16)
    yield "gather 4096 scalars, uint16 to int64", lambda: _kernels.gather(table, starts, 2, many, 0, scalars, small)
    eight = np.empty((4096, 8), np.uint8)
    yield "gather 4096 scalars of 8 bytes", lambda: _kernels.gather(table, starts, 2, many, 0, eight, byte)
    addresses, ends = np.empty(4096, np.int64), np.empty(4096, np.int64)
    yield "locate 4096", lambda: _kernels.locate(table, starts, 2, many, 0, 2, addresses, ends)
    lengths = np.empty(4096, np.int64)
    yield "measure 4096", lambda: _kernels.measure(table, starts, 2, many, 0, lengths)
    where, edges = np.empty(32, np.int64), np.empty(32, np.int64)
    _kernels.locate(table, starts, 2, indices, 0, 2, where, edges)
    flat = np.empty(32 * length * 2, np.uint8)
    yield "copy_spans 32 x 4 kB", lambda: _kernels.copy_spans(where, edges * 2, flat)
    sizes = np.minimum(length, RNG.lognormal(5, 1.1, 256).astype(np.int64) + 1)
    spans = (RNG.integers(0, starts[-1], 256), np.zeros(256, np.int64), sizes, np.cumsum(sizes) - sizes)
    tokens = np.empty(int(sizes.sum()), np.int64)
    yield "gather_spans 256 pieces", lambda: _kernels.gather_spans(table, starts, 2, *spans, 0, tokens, like)
    value_starts, firsts = starts * length, RNG.integers(0, starts[-1] * length - length, 32)
    yield "gather_stream 32 x 2048", lambda: _kernels.gather_stream(table, value_starts, 2, firsts, 0, ids, like)
    data = RNG.integers(0, 255, 1 << 20, np.uint8)
    for size in (16, 100, 4096):
        borders = np.arange(0, (1 << 20) + 1, size)
        hashes = np.empty(len(borders) - 1, np.uint64)
        yield f"hash_spans of {size} bytes", lambda b=borders, h=hashes: _kernels.hash_spans(data, b, h)


def ordering() -> Iterator[tuple[str, Callable[[], object]]]:
    from penstock.order import _kernels

    key, out = 7, np.empty(65_536, np.int64)
    for size in (2**30 + 1, 65_535, 63):
        positions = RNG.integers(0, size, 65_536)
        yield f"permute {size:,}", lambda p=positions, s=size: _kernels.permute(p, out, s, key)
    few, placed = np.arange(32), np.empty(32, np.int64)
    yield "permute a batch of 32", lambda: _kernels.permute(few, placed, 10**9, key)
    windows = 512
    slots = np.arange(windows + 1) * 1000
    groups, shifts, positions = slots[::16].copy(), np.zeros(windows, np.int64), np.arange(65_536)
    yield "windowed_rows", lambda: _kernels.windowed_rows(positions, out, 512_000, key, 16, groups, slots, shifts)
    yield "shuffle_strata", lambda: _kernels.shuffle_strata(positions, out, 2**62, key, 256)
    quotas = np.array([32768, 16384, 8192, 8192])
    yield "deal_evenly", lambda: _kernels.deal_evenly(quotas, out)
    sizes = np.arange(1, 1001)
    classes = (sizes, np.cumsum(sizes) - sizes, sizes)
    yield "deal_classes", lambda: _kernels.deal_classes(positions, out, 2**62, key, True, *classes)


def packing() -> Iterator[tuple[str, Callable[[], object]]]:
    from penstock.packing import _kernels

    key, stream = 7, 1
    for length in (2048, 131_072):
        kept = RNG.lognormal(6.2, 1.1, 1_000_000 if length > 10_000 else 200_000).astype(np.int64) + 1
        histogram = _kernels.count_pieces(kept, length)
        num_pieces = int(histogram[1:].sum())
        slot_rows, row_sizes = _kernels.lay_out(histogram, num_pieces, 2**31 - 1)
        documents, begins, lengths = _kernels.cut(kept, length, num_pieces)
        runs = np.concatenate([[0], np.cumsum(histogram[:0:-1])])
        dealt = _kernels.sort_falling(lengths, runs)
        offsets = np.concatenate([[0], np.cumsum(row_sizes)])
        name = f", rows of {length:,}"
        yield f"count_pieces{name}", lambda k=kept, n=length: _kernels.count_pieces(k, n)
        yield f"count_rows{name}", lambda h=histogram: _kernels.count_rows(h)
        yield f"lay_out{name}", lambda h=histogram, n=num_pieces: _kernels.lay_out(h, n, 2**31 - 1)
        yield f"cut{name}", lambda k=kept, n=length, p=num_pieces: _kernels.cut(k, n, p)
        yield f"sort_falling{name}", lambda s=lengths, r=runs: _kernels.sort_falling(s, r)
        yield f"gather_rows{name}", lambda d=dealt, s=slot_rows, o=offsets: _kernels.gather_rows(d, s, o)
        yield f"shuffle_groups{name}", lambda d=dealt, r=runs: _kernels.shuffle_groups(d, r, key, stream)
        pieces = (documents, begins, lengths)
        yield f"take_pieces{name}", lambda d=dealt, p=pieces: _kernels.take_pieces(d, *p)


def composing() -> Iterator[tuple[str, Callable[[], object]]]:
    from penstock.plan import _kernels

    num_rows, length, per_row = 16, 4096, 12
    drawn = RNG.integers(0, 10**9, 1024)
    yield "extent of 1024", lambda: _kernels.extent(drawn)
    num_windows, rows_per_window = 32, 1000
    slots, rows = RNG.integers(0, num_windows, num_rows), RNG.integers(0, rows_per_window, num_rows)
    row_offsets = np.tile(np.arange(rows_per_window + 1, dtype=np.int32) * per_row, num_windows)
    row_bases = np.arange(num_windows) * (rows_per_window + 1)
    piece_bases = np.arange(num_windows) * rows_per_window * per_row
    documents = RNG.integers(0, 10**6, num_windows * rows_per_window * per_row, np.int32)
    parts, firsts = np.zeros(len(documents), np.uint8), np.arange(num_windows) * 10**6
    windows = (slots, rows, row_bases, row_offsets, piece_bases, documents, parts, firsts, length)
    yield "collect", lambda: _kernels.collect(*windows)
    sizes, offsets = np.full(num_rows * per_row, 300), np.arange(num_rows + 1) * per_row
    numbers = np.arange(num_rows)
    yield "find_targets", lambda: _kernels.find_targets(offsets, sizes, numbers, length)
    ids, labels, positions = (np.zeros((num_rows, length), np.int64) for _ in range(3))
    rest = (np.zeros((num_rows, length), np.int32), np.zeros(len(sizes) + 17, np.int32), np.zeros(num_rows, np.int64))
    none, mask = np.empty(0, np.uint8), RNG.integers(0, 2, num_rows * length).astype(np.uint8)
    for name, is_target in (("", none), (" with a loss mask", mask)):
        yield (
            f"lay_out a batch{name}",
            lambda t=is_target: _kernels.lay_out(offsets, sizes, sizes, t, True, 0, ids, labels, positions, *rest),
        )


def best_microseconds(call: Callable[[], object], clock: Callable[[], float]) -> float:
    call()
    begin = clock()
    call()
    count = max(1, int(0.002 / max(1e-9, clock() - begin)))
    best, end = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        begin = clock()
        for _ in range(count):
            call()
        best = min(best, (clock() - begin) / count)
    return best * 1e6


def measure() -> dict[str, float]:
    figures = {name: best_microseconds(call, time.thread_time) for name, call in kernels()}
    for name, call in kernels():
        if name.startswith(("gather 32 x 2048 uint16 to int64", "lay_out, rows of 2")):
            figures[f"{name}, beside another thread"] = beside_another(call)
    return figures


def beside_another(call: Callable[[], object]) -> float:
    """Processor time of a thread while another does the same: as long as alone, if neither waits for the other."""
    is_over = threading.Event()
    other = threading.Thread(target=lambda: [call() for _ in iter(is_over.is_set, True)])
    other.start()
    try:
        return best_microseconds(call, time.thread_time)
    finally:
        is_over.set()
        other.join()


def in_turns(environments: dict[str, dict[str, str]]) -> dict[str, dict[str, float]]:
    best: dict[str, dict[str, float]] = {side: {} for side in environments}
    for _ in range(TURNS):
        for side, environment in environments.items():
            command = [sys.executable, __file__, "--measure"]
            done = subprocess.run(command, env=os.environ | environment, check=True, capture_output=True, text=True)
            for name, figure in json.loads(done.stdout).items():
                best[side][name] = min(figure, best[side].get(name, float("inf")))
    return best


def main() -> None:
    import penstock.native

    plain = Path(penstock.native.__file__).parent / "kernels.so"
    best = in_turns({"this": {}, "any": {"PENSTOCK_KERNELS": str(plain)}})
    figures = {
        name: {
            "this processor, us": round(figure, 2),
            "any x86-64, us": round(best["any"][name], 2),
            "ratio": round(best["any"][name] / figure, 2),
        }
        for name, figure in best["this"].items()
    }
    print_result("How fast is each loop of the C library?", {"turns": TURNS}, figures)


if __name__ == "__main__":
    if "--measure" in sys.argv:
        print(json.dumps(measure()))
    else:
        main()

"""How fast is the order of rows, and how does it compare with a stored numpy permutation?

    python benchmarks/bench_order.py [--positions 1000000] [--repeats 7]

One core. Each figure is the best of `--repeats` runs. The
numpy permutation is built and then gathered from, in and out of the cache (at 1e9 it would need 8 GB).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
from _machine import print_result

from penstock.order import ORDER_VERSION, FullOrder, LaneOrder, Mixture, Order, Permutation, WindowedOrder

BILLION = 1_000_000_000
# The smallest margins above powers of two and of four, where other ways of cycle walking are slowest;
# sizes below 65,536 and below 64 take more rounds.
SIZES = [BILLION, 2**30 + 1, 2**31 + 1, 2**62, 65_537, 65_535, 1_000, 63]


def best_seconds(run: Callable[[], object], repeats: int) -> float:
    run()
    return min(timed(run) for _ in range(repeats))


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def bench_permutations(positions: np.ndarray, repeats: int) -> dict[str, object]:
    figures = {}
    for size in SIZES:
        permutation, some = Permutation(size, key=7), positions % size
        figures[f"{size:,}"] = {
            "million_per_second": rate(lambda p=permutation, s=some: p(s), some, repeats),
        }
    return figures


def bench_order(order: Order, positions: np.ndarray, repeats: int) -> dict[str, float]:
    scattered = np.random.default_rng(0).integers(0, order.num_rows, positions.size)
    return {
        "million_per_second": rate(lambda: order.rows(positions), positions, repeats),
        "million_per_second_scattered": rate(lambda: order.rows(scattered), positions, repeats),
        "batch_of_32_microseconds": batch_microseconds(lambda: order.rows(positions[:32]), repeats),
    }


def bench_mixture(positions: np.ndarray, repeats: int) -> dict[str, float]:
    mixture = Mixture([0.5, 0.2, 0.15, 0.1, 0.05], seed=7)
    return {
        "million_per_second": rate(lambda: mixture.locate(positions), positions, repeats),
        "batch_of_32_microseconds": batch_microseconds(lambda: mixture.locate(positions[:32]), repeats),
        "build_milliseconds": round(best_seconds(lambda: Mixture(mixture.weights, seed=7), repeats) * 1e3, 2),
    }


def bench_numpy(positions: np.ndarray, repeats: int) -> dict[str, float]:
    rng = np.random.default_rng(7)
    large, stored = np.arange(20_000_000), rng.permutation(positions.size)
    return {
        "build_million_per_second": rate(lambda: rng.permutation(positions.size), positions, repeats),
        "build_million_per_second_of_20_million": rate(lambda: rng.permutation(large.size), large, 1),
        "gather_million_per_second": rate(lambda: stored[positions], positions, repeats),
        "bytes_per_number": stored.itemsize,
    }


def rate(run: Callable[[], object], positions: np.ndarray, repeats: int) -> float:
    return round(positions.size / best_seconds(run, repeats) / 1e6, 1)


def batch_microseconds(run: Callable[[], object], repeats: int) -> float:
    return round(best_seconds(lambda: [run() for _ in range(1000)], repeats) * 1e3, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--positions", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=7)
    settings = parser.parse_args()
    positions, rows_per_window = np.arange(settings.positions), np.full(100_000, 10_000)
    first_use = timed(lambda: Permutation(10, 7)([0]))
    windowed = WindowedOrder(rows_per_window, seed=7, epoch=0, group=16)
    shape = {"windows": len(rows_per_window), "rows": windowed.num_rows, "group": 16, "order_version": ORDER_VERSION}
    figures = {
        "first_use_seconds": round(first_use, 3),
        "permutation": bench_permutations(positions, settings.repeats),
        "full_order": bench_order(FullOrder(BILLION, seed=7, epoch=0), positions, settings.repeats),
        "windowed_order": bench_order(windowed, positions, settings.repeats),
        "lane_order": bench_order(lanes := LaneOrder(rows_per_window, 7, 0, 2, 1024), positions, settings.repeats),
        "lane_order_of_a_rank_in_64": bench_order(lanes, positions * 64, settings.repeats),
        "lane_build_milliseconds": round(
            best_seconds(lambda: LaneOrder(rows_per_window, 7, 1, 2, 1024), settings.repeats) * 1e3, 2
        ),
        "windowed_order_of_a_rank_in_64": bench_order(windowed, positions * 64, settings.repeats),
        "windowed_build_milliseconds": round(
            best_seconds(lambda: WindowedOrder(rows_per_window, 7, 1, 16), settings.repeats) * 1e3, 2
        ),
        "mixture": bench_mixture(positions, settings.repeats),
        "numpy_random_permutation": bench_numpy(positions, settings.repeats),
    }
    print_result("How fast is the order of rows?", {**vars(settings), **shape}, figures)


if __name__ == "__main__":
    main()

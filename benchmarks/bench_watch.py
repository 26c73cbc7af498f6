"""What does watching cost? The same loop, plain and watched, in turns.

1. Microseconds per step: a loop that does nothing else, over a list, over torch's loader and over Penstock's.
2. How much slower a healthy training loop is, whose step computes for some milliseconds.

Both by the clock and in processor time of the process, the thread that looks included. Other programs only ever add
time, so figures are means of the fastest quarter of the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from _machine import print_result
from torch.utils.data import DataLoader, TensorDataset

import penstock


def run(loader: Iterable[Any], step: Callable[[], object]) -> tuple[float, float]:
    """(seconds, processor seconds of this process) of one loop."""
    begin, cpu = time.perf_counter(), time.process_time()
    for _ in loader:
        step()
    return time.perf_counter() - begin, time.process_time() - cpu


def fastest(rounds: list[tuple[float, float]]) -> tuple[float, float]:
    """(seconds, processor seconds): means of the fastest quarter, each on its own."""
    count = max(1, len(rounds) // 4)
    clock, processor = (statistics.mean(sorted(column)[:count]) for column in zip(*rounds, strict=True))
    return clock, processor


def take_turns(loader: Any, step: Callable[[], object], rounds: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """Times of the plain and of the watched loop."""
    plain, watched = [], []
    for number in range(rounds + 1):  # the first starts workers and fills caches
        for is_watched in (False, True) if number % 2 else (True, False):
            if is_watched:
                watch = penstock.watch(loader)  # not closed, since that would close the loader's workers, too
                watched.append(run(watch, step))
            else:
                plain.append(run(loader, step))
    return fastest(plain[1:]), fastest(watched[1:])


def cost_per_step(loader: Any, steps: int, rounds: int) -> dict[str, float]:
    """Microseconds that watching adds to a step."""
    plain, watched = take_turns(loader, lambda: None, rounds)
    return {"clock": (watched[0] - plain[0]) / steps * 1e6, "processor": (watched[1] - plain[1]) / steps * 1e6}


def slow_down(steps: int, rounds: int, size: int) -> dict[str, float]:
    """Watched over plain time of a loop whose step computes."""
    torch.set_num_threads(1)
    loader = DataLoader(TensorDataset(torch.zeros(steps * 4, 8)), batch_size=4, num_workers=1, persistent_workers=True)
    matrix = torch.randn(size, size)
    plain, watched = take_turns(loader, lambda: matrix @ matrix, rounds)
    return {
        "step, milliseconds": plain[0] / steps * 1e3,
        "watched / plain, clock": watched[0] / plain[0],
        "watched / plain, processor": watched[1] / plain[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--size", type=int, default=768, help="rows of the matrix that a healthy step multiplies")
    arguments = parser.parse_args()
    steps = arguments.steps
    rows = torch.arange(steps)
    plan = penstock.from_arrays({"x": rows.numpy()}).batch(1)
    loaders = {
        "a list": [None] * steps,
        "torch, inline": DataLoader(rows, batch_size=1),
        "torch, a worker": DataLoader(rows, batch_size=1, num_workers=1, persistent_workers=True),
        "penstock, inline": penstock.DataLoader(plan, workers="inline"),
        "penstock, a thread": penstock.DataLoader(plan, workers="thread", num_workers=1),
    }
    costs = {name: cost_per_step(loader, steps, arguments.rounds) for name, loader in loaders.items()}
    figures = {"µs per step": costs, "a healthy loop": slow_down(120, 2 * arguments.rounds, arguments.size)}
    print_result("What does watching cost?", vars(arguments), figures, "torch")


if __name__ == "__main__":
    main()

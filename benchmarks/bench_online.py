"""Does a loader find its settings while training runs?

Each job runs with fixed numbers of workers first; their best rate is the mark. Then with num_workers="auto" from a bad
start, and the rate is measured in stretches of 25 steps: at which step it reaches 90 % of the mark, what share of the
later stretches stays there, and what was decided. Storage and accelerator are waits, so that the figures depend less on
what else the machine does.

    python benchmarks/bench_online.py [--steps 400] [--jobs from-none crowded calm faster]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from _machine import print_result

import penstock

STRETCH = 25


@penstock.pure
def fetch(row: dict[str, Any], rng: Any) -> dict[str, Any]:
    """A slow transform: 4 ms of waiting for each row."""
    time.sleep(0.004)
    return row


def compute(row: dict[str, Any], rng: Any) -> dict[str, Any]:
    """A transform that computes, for a millisecond or two, in a process."""
    x = np.arange(20_000, dtype=np.float64)
    for _ in range(20):
        x = np.sqrt(x + 1.0)
    return {**row, "y": float(x[0])}


def plan_of(function: Callable[..., Any] | None) -> penstock.Plan:
    data = penstock.from_arrays({"x": np.arange(1 << 20)}).shuffle(seed=1)
    return (data if function is None else data.map(function)).batch(8)


def rates(loader: penstock.DataLoader, steps: int, step_seconds: Callable[[int], float]) -> list[float]:
    """Steps per second of each stretch."""
    found, begin, number = [], time.perf_counter(), 0
    with loader:
        for number, _ in enumerate(loader, 1):
            time.sleep(step_seconds(number))
            if number % STRETCH == 0:
                now = time.perf_counter()
                found.append(STRETCH / (now - begin))
                begin = now
            if number >= steps:
                break
    return found


def settled(found: list[float]) -> float:
    return statistics.median(found[len(found) // 2 :])


def measure(
    plan: penstock.Plan, start: int, steps: int, step: Callable[[int], float], fixed: list[int]
) -> dict[str, Any]:
    marks = {
        count: settled(
            rates(penstock.DataLoader(plan, epochs=None, num_workers=count), steps // 3, lambda _: step(steps))
        )
        for count in fixed
    }
    best = max(marks.values())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "start.toml"
        path.write_text(f"version = 1\n[loader]\nnum_workers = {start}\n")
        loader = penstock.DataLoader(plan, epochs=None, num_workers="auto", settings=path)
        found = rates(loader, steps, step)
    good = [rate >= 0.9 * best for rate in found]
    first = good.index(True) if True in good else None
    return {
        "fixed, steps/s": {str(count): rate for count, rate in marks.items()},
        "auto: start": start,
        "auto: first stretch / best": found[0] / best,
        "auto: reaches 90 % before step": "never" if first is None else (first + 1) * STRETCH,
        "auto: share of later stretches at 90 %": 0.0 if first is None else statistics.fmean(good[first:]),
        "auto: last half / best": settled(found) / best,
        "auto: workers at the end": loader._run.num_workers,  # type: ignore[union-attr]
        "auto: decisions": " | ".join(loader.stats().decisions),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--jobs", nargs="+", default=["from-none", "crowded", "calm", "faster"])
    arguments = parser.parse_args()
    steps, half = arguments.steps, arguments.steps // 2
    jobs = {
        "from-none": lambda: measure(plan_of(fetch), 0, steps, lambda number: 0.010, [0, 2, 4, 6]),
        "crowded": lambda: measure(plan_of(compute), 8, steps, lambda number: 0.015, [1, 2, 8]),
        "calm": lambda: measure(plan_of(None), 1, steps, lambda number: 0.010, [1, 2]),
        "faster": lambda: measure(
            plan_of(fetch), 2, steps, lambda number: 0.020 if number < half else 0.010, [2, 4, 6]
        ),
    }
    figures = {name: jobs[name]() for name in arguments.jobs}
    print_result("Does a loader find its settings while training runs?", vars(arguments), figures, "torch")


if __name__ == "__main__":
    main()

"""Does a loader find its settings while training runs?

Each job runs with fixed numbers of workers first; their best rate is the mark. Then `--repeats` times with
num_workers="auto" from a bad start, and the rate is measured in stretches of 25 steps: at which step it reaches 90 % of
the mark, what share of the later stretches stays there, the median after 200 steps, when it has tried what there is to
try, what was decided, and whether every batch is the one that the plan says. Storage and accelerator are waits, so that
the figures depend less on what else the machine does.

    from-none   0 workers, and a transform that waits 4 ms for each of 8 rows; the step takes 10 ms
    crowded     8 processes, of which each decompresses every chunk for itself; the step takes 5 ms
    calm        nothing to gain
    faster      the step takes 20 ms, and half-way 10 ms; the mark is that of the faster half

    python benchmarks/bench_online.py [--steps 400] [--repeats 3] [--jobs from-none crowded calm faster]
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _continued import Measurements
from _machine import print_result

import penstock

STRETCH = 25
ROWS_PER_CHUNK = 64


@penstock.pure
def fetch(row: dict[str, Any], rng: Any) -> dict[str, Any]:
    """A slow transform: 4 ms of waiting for each row."""
    time.sleep(0.004)
    return row


def decompress(row: dict[str, Any], rng: Any) -> dict[str, Any]:
    """A row of a compressed chunk, as HDF5 and Zarr store them: a worker keeps the last chunk that it has read."""
    return {**row, "y": read_chunk(int(row["x"]) // ROWS_PER_CHUNK)[int(row["x"]) % ROWS_PER_CHUNK]}


@functools.lru_cache(maxsize=1)
def read_chunk(number: int) -> np.ndarray:
    return np.frombuffer(zlib.decompress(compressed_chunk()), np.uint8)[:ROWS_PER_CHUNK].astype(np.int64) + number


@functools.cache
def compressed_chunk() -> bytes:
    return zlib.compress(np.random.default_rng(0).integers(0, 16, 4_000_000, np.uint8).tobytes(), 1)


def plan_of(function: Callable[..., Any] | None) -> penstock.Plan:
    data = penstock.from_arrays({"x": np.arange(1 << 20)})
    data = data if function is decompress else data.shuffle(seed=1)
    return (data if function is None else data.map(function)).batch(8)


def rates(
    loader: penstock.DataLoader, steps: int, step_seconds: Callable[[int], float]
) -> tuple[list[float], list[np.ndarray]]:
    """(steps per second of each stretch, the rows of each batch)"""
    found, rows, begin = [], [], time.perf_counter()
    for number, batch in enumerate(loader, 1):
        time.sleep(step_seconds(number))
        rows.append(batch["x"].numpy().copy())
        if number % STRETCH == 0:
            now = time.perf_counter()
            found.append(STRETCH / (now - begin))
            begin = now
        if number >= steps:
            break
    return found, rows


def settled(found: list[float]) -> float:
    return statistics.median(found[len(found) // 2 :])


@dataclass
class Job:
    """What is run, and how it begins."""

    function: Callable[..., Any] | None
    start: int
    fixed: list[int]
    """Numbers of workers whose best rate is the mark."""
    step: Callable[[int], float]
    """Seconds of a step, by its number."""
    counted_from: int = 0
    """The step at which the mark becomes that of the job."""

    def fixed_rate(self, num_workers: int, steps: int) -> float:
        """Steps per second with a number of workers that stays."""
        with penstock.DataLoader(plan_of(self.function), epochs=None, num_workers=num_workers) as loader:
            return settled(rates(loader, steps // 3, lambda _: self.step(steps))[0])

    def tuned(self, steps: int, best: float) -> dict[str, Any]:
        """One run that finds its settings."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "start.toml"
            path.write_text(f"version = 1\n[loader]\nnum_workers = {self.start}\n")
            with penstock.DataLoader(plan_of(self.function), epochs=None, num_workers="auto", settings=path) as loader:
                found, rows = rates(loader, steps, self.step)
                stats = loader.stats()
        plain = plan_of(self.function).without_maps()
        good = [rate >= 0.9 * best for rate in found[self.counted_from // STRETCH :]]
        first = good.index(True) if True in good else None
        return {
            "first stretch / best": found[0] / best,
            "reaches 90 % after steps": "never" if first is None else (first + 1) * STRETCH,
            "share of later stretches at 90 %": 0.0 if first is None else statistics.fmean(good[first:]),
            "after 200 steps / best": statistics.median(
                found[self.counted_from // STRETCH :][200 // STRETCH :] or found[-1:]
            )
            / best,
            "last quarter / best": statistics.median(found[-len(found) // 4 :]) / best,
            "workers at the end": stats.num_workers,
            "batches as the plan says": all(
                np.array_equal(batch, plain.read(step)["x"]) for step, batch in enumerate(rows)
            ),
            "decisions": " | ".join(stats.decisions) or "none",
        }


def measure(name: str, job: Job, steps: int, repeats: int, kept: Measurements) -> dict[str, Any]:
    marks = {
        str(count): kept.get(f"{name}, {count} workers", lambda count=count: job.fixed_rate(count, steps))
        for count in job.fixed
    }
    best = max(marks.values())
    runs = {
        f"run {number}": kept.get(f"{name}, run {number}", lambda: job.tuned(steps, best)) for number in range(repeats)
    }
    return {"fixed, steps/s": marks, "start": job.start, **runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--jobs", nargs="+", default=["from-none", "crowded", "calm", "faster"])
    parser.add_argument("--keep", metavar="FILE", help="keep measurements here, and go on with those there")
    parser.add_argument("--minutes", type=float, help="begin no measurement after this time")
    arguments = parser.parse_args()
    steps, half = arguments.steps, arguments.steps // 2
    jobs = {
        "from-none": Job(fetch, 0, [0, 2, 4, 6], lambda number: 0.010),
        "crowded": Job(decompress, 8, [1, 2, 8], lambda number: 0.005),
        "calm": Job(None, 1, [1, 2], lambda number: 0.010),
        "faster": Job(fetch, 2, [2, 4, 6], lambda number: 0.020 if number < half else 0.010, counted_from=half),
    }
    kept = Measurements(arguments.keep, arguments.minutes)
    figures = {name: measure(name, jobs[name], steps, arguments.repeats, kept) for name in arguments.jobs}
    print_result("Does a loader find its settings while training runs?", vars(arguments), figures, "torch")


if __name__ == "__main__":
    main()

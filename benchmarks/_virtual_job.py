"""A training job on a machine in virtual time, for `bench_tune.py --simulated`.

Workers take batches in turn, whoever computes shares the processors, and waiting is free. It shares nothing with the
model of the search (`penstock.tuning`), which it is there to test.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class VirtualJob:
    """A job on a machine in virtual time. It shares nothing with the model of the search."""

    space: dict[str, Any]
    draw_batch: Callable[[random.Random], tuple[float, float]]
    """(seconds of waiting, seconds of computing) of one batch."""
    step: tuple[float, float]
    """The same of a training step."""
    cores: int = 2

    def turn(self, arm: dict[str, Any], steps: int, rng: random.Random) -> tuple[float, list[float]]:
        """(steps per second, seconds of each batch)."""
        workers = arm["num_workers"]
        depth = max(1, arm["prefetch"] // workers) if "prefetch" in arm else arm["prefetch_factor"]
        settle = workers + 1
        batches = [self.draw_batch(rng) for _ in range(steps + settle + workers * depth)]
        left = [[*each] for each in batches]
        step_left: list[float] | None = None
        taken, now, begun, tick = 0, 0.0, 0.0, 0.0005
        at_work = [0] * workers  # turns of each worker that are over: it computes batch worker + turn * workers
        while taken < steps + settle:
            if step_left is None and self._is_ready(taken, workers, at_work):
                step_left = [*self.step]
                taken += 1
                if taken == settle:
                    begun = now
            active = [left[number] for number in self._numbers(at_work, workers, taken, depth) if number < len(left)]
            active += [step_left] if step_left is not None else []
            computing = sum(each[0] <= 0 for each in active)
            share = tick * min(1.0, self.cores / max(1, computing))
            for each in active:
                each[0 if each[0] > 0 else 1] -= tick if each[0] > 0 else share
            for worker in range(workers):
                number = worker + at_work[worker] * workers
                if number < len(left) and left[number][0] <= 0 and left[number][1] <= 0:
                    at_work[worker] += 1
            if step_left is not None and step_left[0] <= 0 and step_left[1] <= 0:
                step_left = None
            now += tick
        return (taken - settle) / (now - begun), [sum(each) for each in batches]

    def _is_ready(self, number: int, workers: int, at_work: list[int]) -> bool:
        return number // workers < at_work[number % workers]

    def _numbers(self, at_work: list[int], workers: int, taken: int, depth: int) -> list[int]:
        """Batches that workers are at: each has a queue of its own, as deep as it may be."""
        given = [worker + turns * workers for worker, turns in enumerate(at_work)]
        return [number for number in given if number < taken + workers * depth]


def draw_images(rng: random.Random) -> tuple[float, float]:
    return sum(0.020 if rng.random() < 0.02 else 0.001 for _ in range(12)), 12 * 0.0004


def draw_tokens(rng: random.Random) -> tuple[float, float]:
    return (0.080 if rng.random() < 1 / 16 else 0.012), 0.0005

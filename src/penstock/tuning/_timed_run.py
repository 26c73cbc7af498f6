"""One turn: a fresh loader, some steps that are not counted, and some that are.

             start      warm-up            counted
    make_loader ── first batch ── step … │ wait, step, wait, step, … │ close
                                         └ clocks, CPU time ─────────┘ memory

A turn starts like a run, so no loader profits from a queue that it filled during other turns, and none computes during
the turn of another. If an epoch ends within a turn, the next one starts, and the time for that counts: that is what
`persistent_workers` is for.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from penstock.machine import process_tree
from penstock.tuning._job import TrainStep

NO_BATCHES = "make_loader() returned a loader without batches: there is nothing to measure."
_LEAST_WARM_UP = 2


class EmptyLoader(ValueError):
    """A loader without batches."""


class Measured(NamedTuple):
    """What a turn took. Seconds and sums are those of the counted steps."""

    num_steps: int
    seconds: float
    waits: tuple[float, ...]
    """Time in `next()`, for each step."""
    steps: tuple[float, ...]
    first_batch_seconds: float
    """From making the loader to its first batch."""
    wait_cpu_seconds: float
    """CPU time of the training process in `next()`."""
    step_cpu_seconds: float
    """CPU time of the training process in the steps."""
    cpu_seconds: float
    """CPU time of the training process and its workers."""
    memory_bytes: float | None
    """Memory at the end; shared pages count once, if the kernel says which."""

    @property
    def rate(self) -> float:
        """Steps per second."""
        return self.num_steps / max(self.seconds, 1e-9)

    @property
    def loading_seconds(self) -> float:
        """Mean wait for a batch."""
        return sum(self.waits) / max(1, self.num_steps)

    @property
    def cores(self) -> float:
        """CPU time, in processors."""
        return self.cpu_seconds / max(self.seconds, 1e-9)


def warm_up_steps(num_workers: int) -> int:
    """Steps until each worker has delivered its first batch, and start-up is over."""
    return max(_LEAST_WARM_UP, num_workers)


def take_turn(loader: Iterable[Any], train_step: TrainStep, *, num_steps: int, warm_up: int, begun: float) -> Measured:
    """Run some steps and measure all except the warm-up; making the loader started at `begun`.

    Raises:
        EmptyLoader: there are no batches.
        Exception: what the loader or the step raises.
    """
    batches = _endless(loader)
    batch = next(batches)
    first_batch = time.perf_counter() - begun
    for number in range(warm_up):
        train_step(batch)
        batch = next(batches) if number < warm_up - 1 else None
    _synchronize()
    waits: list[float] = []
    steps: list[float] = []
    wait_cpu = step_cpu = 0.0
    children_before, start = _cpu_of_children(), time.perf_counter()
    asked, asked_cpu = start, time.process_time()
    for _ in range(num_steps):
        batch = next(batches)
        got, got_cpu = time.perf_counter(), time.process_time()
        train_step(batch)
        if len(steps) == num_steps - 1:
            _synchronize()
        waits.append(got - asked)
        wait_cpu += got_cpu - asked_cpu
        asked, asked_cpu, before, before_cpu = time.perf_counter(), time.process_time(), got, got_cpu
        steps.append(asked - before)
        step_cpu += asked_cpu - before_cpu
    seconds = asked - start
    cpu = wait_cpu + step_cpu + _cpu_of_children() - children_before
    memory = _memory_of_tree()
    return Measured(num_steps, seconds, tuple(waits), tuple(steps), first_batch, wait_cpu, step_cpu, cpu, memory)


def close_loader(loader: Any) -> None:
    """Close a loader, and with it its workers."""
    close = getattr(loader, "close", None)
    if callable(close):
        close()


def _endless(loader: Iterable[Any]) -> Iterator[Any]:
    """Batches of one epoch after the other."""
    num_batches = 0
    while True:
        num_before = num_batches
        for batch in loader:
            num_batches += 1
            yield batch
        if not num_batches:
            raise EmptyLoader(NO_BATCHES)
        if num_batches == num_before:
            raise EmptyLoader(
                f"make_loader() returned a loader that ends after batch {num_batches:,} and cannot start again (a "
                "generator?). Return one that can be iterated over again, or that has more batches."
            )


def _synchronize() -> None:
    """Wait for what the step has only queued on the accelerator."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _cpu_of_children() -> float:
    """CPU seconds of this process's descendants; the kernel counts in ticks of 10 ms."""
    return sum(each.cpu_seconds for each in process_tree(os.getpid())[1:])


def _memory_of_tree() -> float | None:
    tree = process_tree(os.getpid(), with_pss=True)
    if not tree:
        return None
    return float(sum(each.rss_bytes if each.pss_bytes is None else each.pss_bytes for each in tree))

"""`penstock bench`: how fast a loader is by itself, with a step of a given length, and with the real step.

    limit         plan.read in a loop, in this thread, if the loader has a plan; memory bandwidth; for a job, its step
                  on the same batch again
    loader        batches as fast as they come
    + N ms step   a step that only waits, as for an accelerator
    + the step    the job's

The share of the limit is how much of it remains: above 1 if several workers beat one thread.
"""

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from penstock.machine import describe_machine
from penstock.plan import Plan
from penstock.report import Fact, FigureTable, Headline, Page, StepTimes, format_bytes, format_number, format_seconds
from penstock.tuning._job import (
    NO_BATCHES,
    EmptyLoader,
    Measured,
    TrainingJob,
    close_loader,
    describe_exit,
    take_turn,
    warm_up_steps,
)

_COPIED_BYTES = 64 << 20
_LIMIT_SECONDS = 0.5


class BenchLine(NamedTuple):
    """One way to run the loader."""

    name: str
    measured: Measured
    limit: float
    """The most steps per second that are possible."""

    @property
    def share(self) -> float:
        return self.measured.rate / self.limit if self.limit else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Measurements of a loader."""

    name: str
    lines: tuple[BenchLine, ...]
    read_rate: float | None
    """Batches per second of `plan.read` in one thread."""
    batch_bytes: int | None
    copy_bytes_per_second: float
    """How fast one thread copies memory."""

    def table(self) -> FigureTable:
        """One line for each way to run it."""
        header = ("", "batches/s", "of the limit", "first batch", "wait per step", "CPU per batch", "memory")
        return FigureTable(title="Ways to run it", header=header, rows=tuple(map(_cells, self.lines)))

    def facts(self) -> Iterator[str]:
        """What the limits are."""
        if self.read_rate is not None:
            yield f"plan.read in a loop, one thread: {format_number(self.read_rate)} batches/s."
        if self.batch_bytes:
            bound = format_number(self.copy_bytes_per_second / self.batch_bytes)
            yield (
                f"Memory: {format_bytes(self.copy_bytes_per_second)}/s copied by one thread, "
                f"{format_bytes(self.batch_bytes)} per batch: {bound} batches/s."
            )

    def to_json(self) -> dict[str, Any]:
        lines = [
            {
                "name": line.name,
                "batches_per_second": line.measured.rate,
                "limit": line.limit if math.isfinite(line.limit) else None,
                "share": line.share if math.isfinite(line.share) else None,
                "first_batch_seconds": line.measured.first_batch_seconds,
                "wait_seconds": line.measured.loading_seconds,
                "cpu_seconds": line.measured.cpu_seconds / line.measured.num_steps,
                "memory_bytes": line.measured.memory_bytes,
            }
            for line in self.lines
        ]
        rates = {"read_rate": self.read_rate, "batch_bytes": self.batch_bytes}
        return {"name": self.name, **rates, "copy_bytes_per_second": self.copy_bytes_per_second, "lines": lines}

    def verdict(self) -> str:
        last = self.lines[-1]
        rate, waits = format_number(last.measured.rate), 100 * last.measured.loading_seconds * last.measured.rate
        return (
            f"{last.name[:1].upper()}{last.name[1:]}: {rate} batches/s, {100 * last.share:.0f} % of the limit; "
            f"{waits:.0f} % of the time is spent waiting for data."
        )

    def page(self) -> Page:
        machine = describe_machine()
        alone, last = self.lines[0].measured, self.lines[-1].measured
        heads = (
            Headline(value=f"{format_number(alone.rate)}/s", label="batches, the loader alone"),
            Headline(value=f"{100 * self.lines[-1].share:.0f} %", label=f"of the limit: {self.lines[-1].name}"),
            Headline(value=format_seconds(alone.first_batch_seconds), label="until the first batch"),
        )
        facts = (
            Fact(name="processor", value=machine.processor),
            Fact(name="processors", value=str(machine.usable_processors)),
        )
        return Page(
            title=f"penstock bench · {self.name}",
            verdict=self.verdict(),
            headlines=heads,
            tables=(self.table(),),
            steps=StepTimes(wait=last.waits, step=last.steps),
            machine=facts,
            notes=tuple(self.facts()),
        )

    def __str__(self) -> str:
        return "\n".join([str(self.table()), "", *self.facts(), self.verdict()])


def bench_plan(plan: Plan, name: str, *, steps: int, step_seconds: Sequence[float], options: dict[str, Any]) -> Bench:
    """A plan's loader, alone and with steps that wait.

    Raises:
        EmptyLoader: the plan has no batches.
    """
    from penstock.pytorch import DataLoader

    if not plan.num_rows:
        raise EmptyLoader(f"{name}: the plan has no rows, so there are no batches to measure.")
    make = functools.partial(DataLoader, plan, epochs=None, **options)
    batch_bytes, read_rate, copied = _num_bytes(plan.read(0)), _rate_of(_reader(plan)), _copy_rate()
    lines = _lines_without_job(make, read_rate, steps, step_seconds)
    return Bench(name=name, lines=lines, read_rate=read_rate, batch_bytes=batch_bytes, copy_bytes_per_second=copied)


def bench_job(job: TrainingJob, *, steps: int, step_seconds: Sequence[float], options: dict[str, Any]) -> Bench:
    """A job's loader, alone, with steps that wait, and with its own step, whose limit is the step without loading.

    Raises:
        EmptyLoader: it has no batches.
        RuntimeError: the job fails; the cause is its own error.
    """
    make = functools.partial(job.make_loader, **options)
    try:
        batch, plan = _look(make)
        read_rate = None if plan is None else _rate_of(_reader(plan))
        lines = _lines_without_job(make, math.nan if read_rate is None else read_rate, steps, step_seconds)
        limit = _rate_of(lambda: job.train_step(batch))
        lines += (BenchLine("with the job's step", _measure(make, job.train_step, steps), limit),)
    except EmptyLoader:
        raise
    except (Exception, SystemExit) as error:
        reason = describe_exit(error) if isinstance(error, SystemExit) else error
        raise RuntimeError(f"{job.name} could not be measured: {reason}") from error
    size, copied = _num_bytes(batch), _copy_rate()
    return Bench(name=job.name, lines=lines, read_rate=read_rate, batch_bytes=size, copy_bytes_per_second=copied)


def _lines_without_job(
    make: Callable[[], Any], limit: float, steps: int, step_seconds: Sequence[float]
) -> tuple[BenchLine, ...]:
    """The loader alone, whose limit is given, and with steps that wait."""

    def waiting(seconds: float) -> BenchLine:
        measured = _measure(make, lambda batch: time.sleep(seconds), steps)
        return BenchLine(f"with a step of {format_seconds(seconds)}", measured, 1 / seconds)

    return BenchLine("loader alone", _measure(make, lambda batch: None, steps), limit), *map(waiting, step_seconds)


def _look(make: Callable[[], Any]) -> tuple[Any, Plan | None]:
    """A batch of the job's, and the plan it comes from, if any."""
    loader = make()
    try:
        for batch in loader:
            plan = getattr(loader, "dataset", None)
            return batch, plan if isinstance(plan, Plan) else None
        raise EmptyLoader(NO_BATCHES)
    finally:
        close_loader(loader)


def _num_bytes(batch: Any) -> int:
    """Bytes of the arrays and tensors in a batch, however it is nested."""
    if isinstance(batch, Mapping):
        return sum(map(_num_bytes, batch.values()))
    if isinstance(batch, list | tuple):
        return sum(map(_num_bytes, batch))
    return int(getattr(batch, "nbytes", 0))


def _measure(make: Callable[[], Any], step: Callable[[Any], Any], num_steps: int) -> Measured:
    begun = time.perf_counter()
    loader = make()
    try:
        return take_turn(loader, step, num_steps=num_steps, warm_up=warm_up_steps(4), begun=begun)
    finally:
        close_loader(loader)


def _rate_of(function: Callable[[], Any]) -> float:
    """Calls per second, after a first call that fills caches."""
    function()
    begin, count = time.perf_counter(), 0
    while (seconds := time.perf_counter() - begin) < _LIMIT_SECONDS or count < 2:
        function()
        count += 1
    return count / seconds


def _reader(plan: Plan) -> Callable[[], Any]:
    steps = itertools.count()
    return lambda: plan.read(next(steps) % max(1, plan.num_batches()))


def _copy_rate() -> float:
    """Bytes per second that one thread copies."""
    source = np.ones(_COPIED_BYTES, np.uint8)
    target = np.empty_like(source)
    return _COPIED_BYTES * _rate_of(lambda: np.copyto(target, source))


def _cells(line: BenchLine) -> tuple[str, ...]:
    found = line.measured
    return (
        line.name,
        format_number(found.rate),
        "–" if math.isnan(line.share) else f"{100 * line.share:.0f} %",
        format_seconds(found.first_batch_seconds),
        format_seconds(found.loading_seconds),
        format_seconds(found.cpu_seconds / found.num_steps),
        "–" if found.memory_bytes is None else format_bytes(found.memory_bytes),
    )

"""What a watched run came to: its steps in bounded memory, then numbers and words; and scalars, as for TensorBoard.

    add(row) -> 1024 rows -> totals        exact sums
                          -> latest        the last 4,096 steps, as they were
                          -> blocks        the whole run: at most 2,048 sums of `steps_per_block` consecutive steps
                          -> waits         how many waits of which length, in bins of a sixteenth of an octave
                          -> longest       the steps that waited longest

When the blocks are full, each two become one. All of it takes about 1 MB.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import counted
from penstock.machine import MachineFacts, Sampler, UsageHistory
from penstock.report import format_bytes, format_number, format_seconds

_ROWS_AT_ONCE = 1024
_MOST_LATEST = 4096
_MOST_BLOCKS = 2048
_MOST_LONGEST = 20
_BINS_PER_OCTAVE = 16
_SHORTEST = 1e-7
_NUM_BINS = 40 * _BINS_PER_OCTAVE

Matrix = NDArray[np.float64]
HEALTHY_SHARE = 0.05
"""Of the time spent waiting: below it there is little to win."""
_NOISE = 1e-3
"""Seconds that are not worth mentioning."""

Log = Callable[[Mapping[str, float], int], object]

_OF_STEPS = {
    "wait": "data/wait_seconds",
    "step": "data/step_seconds",
    "transfer": "data/transfer_seconds",
    "delay": "data/no_core_seconds",
    "major_faults": "data/major_faults",
    "queued": "data/batches_ready",
}


class StepRow(NamedTuple):
    """One step. NaN: not measured."""

    begin: float
    """When its batch was asked for, on the clock of `time.perf_counter`."""
    wait: float
    """Seconds in `next()`."""
    step: float
    """Seconds from the batch to the next request."""
    transfer: float
    """Seconds of the step that went to copies to the device."""
    cpu: float
    """Processor seconds of the training thread; this and the next three since they were last read."""
    delay: float
    """Seconds that it was ready to run and had no core."""
    minor_faults: float
    major_faults: float
    queued: float
    """Batches that were ready when it asked."""


COLUMNS = {name: place for place, name in enumerate(StepRow._fields)}


class StepHistory:
    """Takes rows, and keeps no more than it may."""

    def __init__(self) -> None:
        self._incoming: list[StepRow] = []
        self.num_steps = 0
        self._sums = np.zeros(len(COLUMNS))
        self._known = np.zeros(len(COLUMNS))
        self._latest: Matrix = np.empty((0, len(COLUMNS)))
        self._blocks = np.zeros((_MOST_BLOCKS, 2, len(COLUMNS)))
        """(sums, how many are known) of each block."""
        self.steps_per_block = 1
        self._waits = np.zeros(_NUM_BINS, np.int64)
        self._longest: Matrix = np.empty((0, 1 + len(COLUMNS)))

    def add(self, row: StepRow) -> None:
        """Keep one step, for now as it is: putting it into an array takes 20 µs if numpy's code is cold."""
        self._incoming.append(row)
        if len(self._incoming) == _ROWS_AT_ONCE:
            self.flush()

    @property
    def num_added(self) -> int:
        """Steps so far, those that wait for the next flush included."""
        return self.num_steps + len(self._incoming)

    def flush(self) -> None:
        """Bring everything up to date with what was added."""
        if not self._incoming:
            return
        rows = np.array(self._incoming)
        numbered = np.column_stack([np.arange(self.num_steps, self.num_steps + len(rows)), rows])
        self._add_blocks(rows)
        self._sums += np.nansum(rows, axis=0)
        self._known += np.isfinite(rows).sum(axis=0)
        self._latest = np.concatenate([self._latest, rows])[-_MOST_LATEST:]
        self._waits += np.bincount(_bins(rows[:, COLUMNS["wait"]]), minlength=_NUM_BINS)
        longest = np.concatenate([self._longest, numbered])
        self._longest = longest[np.argsort(-longest[:, 1 + COLUMNS["wait"]], kind="stable")[:_MOST_LONGEST]]
        self.num_steps += len(rows)
        self._incoming.clear()

    def total(self, column: str) -> float:
        """Sum over all steps in which it was measured; NaN when it never was."""
        self.flush()
        place = COLUMNS[column]
        return float(self._sums[place]) if self._known[place] else math.nan

    def mean(self, column: str) -> float:
        """Over all steps in which it was measured; NaN when it never was."""
        return self.total(column) / max(1.0, float(self._known[COLUMNS[column]]))

    def wait_quantile(self, share: float) -> float:
        """Seconds that this share of the waits stayed below, to 5 %."""
        self.flush()
        if not self.num_steps:
            return math.nan
        place = int(np.searchsorted(np.cumsum(self._waits), share * self.num_steps))
        return _SHORTEST * 2 ** ((place + 0.5) / _BINS_PER_OCTAVE) if place else 0.0

    def latest(self) -> tuple[int, Matrix]:
        """(number of the first, rows) of the latest steps."""
        self.flush()
        return self.num_steps - len(self._latest), self._latest

    def longest(self) -> list[tuple[int, float]]:
        """(step, seconds) of the longest waits, longest first."""
        self.flush()
        return [(int(row[0]), float(row[1 + COLUMNS["wait"]])) for row in self._longest]

    def means(self, column: str) -> Matrix:
        """Of each block of `steps_per_block` steps, over the whole run."""
        self.flush()
        place = COLUMNS[column]
        blocks = self._blocks[: -(-self.num_steps // self.steps_per_block)]
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(blocks[:, 0, place] / blocks[:, 1, place])

    def _add_blocks(self, rows: Matrix) -> None:
        numbers = np.arange(self.num_steps, self.num_steps + len(rows))
        while numbers[-1] // self.steps_per_block >= _MOST_BLOCKS:
            halved = self._blocks.reshape(_MOST_BLOCKS // 2, 2, 2, len(COLUMNS)).sum(axis=1)
            self._blocks = np.concatenate([halved, np.zeros_like(halved)])
            self.steps_per_block *= 2
        is_known = np.isfinite(rows)
        np.add.at(
            self._blocks, numbers // self.steps_per_block, np.stack([np.where(is_known, rows, 0.0), is_known], axis=1)
        )


def _bins(seconds: Matrix) -> NDArray[np.int64]:
    places = np.log2(np.maximum(seconds, _SHORTEST) / _SHORTEST) * _BINS_PER_OCTAVE
    return np.asarray(np.clip(places, 0, _NUM_BINS - 1), np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSummary:
    """Means are per step. None: it could not be measured here."""

    name: str
    num_steps: int
    num_loops: int
    """How often iterating began."""
    seconds: float
    """In steps and waits together."""
    wait_seconds: float
    step_seconds: float
    transfer_seconds: float | None
    wait_share: float
    """Of the time, spent waiting for batches."""
    typical_wait_seconds: float
    """Half of the waits are shorter."""
    long_wait_seconds: float
    """One in a hundred is longer."""
    longest_waits: tuple[tuple[int, float], ...]
    """(step, seconds), longest first."""
    start_seconds: float
    """Of one loop, before its first batch was asked for."""
    training_thread_cores: float
    """Of processor time."""
    no_core_seconds: float | None
    """In which the training thread was ready to run but no core was free (its run-queue delay)."""
    minor_faults: float
    major_faults: float
    """Pages that the training thread waited for from disk."""
    batches_ready: float | None
    """When one was asked for."""
    training_cores: float | None
    """Of the training process; the next ones, of its workers and of everything else on this machine."""
    worker_cores: float | None
    other_cores: float | None
    read_bytes_per_second: float | None
    """From storage, by the training process and its workers."""
    resident_bytes: float | None
    """The most that they held; shared pages counted in each process."""
    proportional_bytes: float | None
    """The most that they held; shared pages counted once."""
    accelerator_utilization: float | None
    accelerator_memory_bytes: float | None
    machine: MachineFacts

    @property
    def steps_per_second(self) -> float:
        """Waits included."""
        return self.num_steps / self.seconds if self.seconds else 0.0

    @property
    def is_healthy(self) -> bool:
        """Whether so little time goes to waiting that a better loader would hardly help."""
        return self.wait_share < HEALTHY_SHARE

    @property
    def verdict(self) -> str:
        if not self.num_steps:
            return "No step was completed, so there is nothing to say yet."
        share = format_share(self.wait_share)
        if self.is_healthy:
            return f"Training hardly waits for data: {share} of the time."
        both = self.wait_seconds + self.step_seconds
        return (
            f"Training waits for data {share} of the time: {format_seconds(self.wait_seconds)} of the "
            f"{format_seconds(both)} that a step takes."
        )

    def __str__(self) -> str:
        return "\n".join([self.verdict, *self._details()])

    def _details(self) -> Iterator[str]:
        if not self.num_steps:
            return
        rate = format_number(self.steps_per_second)
        yield f"{counted(self.num_steps, 'step')} in {format_seconds(self.seconds)}: {rate} a second."
        if not self.is_healthy:
            yield (
                f"Half of the waits are below {format_seconds(self.typical_wait_seconds)}, one in a hundred is above "
                f"{format_seconds(self.long_wait_seconds)}; the longest was at step {self.longest_waits[0][0]:,}: "
                f"{format_seconds(self.longest_waits[0][1])}."
            )
        if self.start_seconds > _NOISE:
            loops = "The loop" if self.num_loops == 1 else f"Each of {self.num_loops:,} loops"
            yield f"{loops} took {format_seconds(self.start_seconds)} to begin."
        if self.transfer_seconds is not None:
            yield f"Copies to the device take {format_seconds(self.transfer_seconds)} of a step."
        yield from self._processors()
        if self.batches_ready is not None:
            yield f"{format_number(self.batches_ready)} batches were ready on average when one was asked for."
        if self.read_bytes_per_second is not None and self.read_bytes_per_second > 1e5:
            yield f"{format_bytes(self.read_bytes_per_second)} a second came from storage."
        if self.resident_bytes is not None:
            once = "" if self.proportional_bytes is None else f" ({format_bytes(self.proportional_bytes)} counted once)"
            yield f"Training process and workers held up to {format_bytes(self.resident_bytes)}{once}."
        if self.accelerator_utilization is not None:
            yield f"The accelerator was busy {format_share(self.accelerator_utilization)} of the time."

    def _processors(self) -> Iterator[str]:
        if self.training_cores is not None and self.worker_cores is not None and self.other_cores is not None:
            training, workers, others = map(format_cores, (self.training_cores, self.worker_cores, self.other_cores))
            yield (
                f"Of {counted(self.machine.num_processors, 'core')}, training used {training}, its workers {workers}, "
                f"other programs {others}."
            )
        if self.no_core_seconds is not None and self.no_core_seconds > _NOISE:
            yield f"The training thread was ready but had no core for {format_seconds(self.no_core_seconds)} of a step."


def summarise(
    name: str, history: StepHistory, starts: tuple[float, ...], usage: UsageHistory | None, machine: MachineFacts
) -> WatchSummary:
    """The summary of what was recorded."""
    history.flush()
    wait, step = (history.total(column) if history.num_steps else 0.0 for column in ("wait", "step"))
    count = max(1, history.num_steps)
    rates: list[float | None] = [None] * 4
    if usage is not None and len(usage.time_seconds) > 1:
        rates = [_known(float(column[0])) for column in usage.rates(overall=True)]

    def of_usage(reduce: Callable[[NDArray[np.float64]], float], column: str) -> float | None:
        values = np.empty(0) if usage is None else getattr(usage, column)
        measured = values[np.isfinite(values)]
        return float(reduce(measured)) if len(measured) else None

    return WatchSummary(
        name=name,
        num_steps=history.num_steps,
        num_loops=len(starts),
        seconds=wait + step,
        wait_seconds=wait / count,
        step_seconds=step / count,
        transfer_seconds=_known(history.mean("transfer")),
        wait_share=wait / (wait + step) if wait + step else 0.0,
        typical_wait_seconds=history.wait_quantile(0.5),
        long_wait_seconds=history.wait_quantile(0.99),
        longest_waits=tuple(history.longest()),
        start_seconds=sum(starts) / max(1, len(starts)),
        training_thread_cores=history.total("cpu") / (wait + step) if wait + step else 0.0,
        no_core_seconds=_known(history.mean("delay")),
        minor_faults=history.mean("minor_faults"),
        major_faults=history.mean("major_faults"),
        batches_ready=_known(history.mean("queued")),
        training_cores=rates[0],
        worker_cores=rates[1],
        other_cores=rates[2],
        read_bytes_per_second=rates[3],
        resident_bytes=of_usage(np.max, "rss_bytes"),
        proportional_bytes=of_usage(np.max, "pss_bytes"),
        accelerator_utilization=of_usage(np.mean, "accelerator_utilization"),
        accelerator_memory_bytes=of_usage(np.max, "accelerator_memory_bytes"),
        machine=machine,
    )


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def format_cores(cores: float) -> str:
    """A number of cores, with the two decimals that ticks of 10 ms can resolve."""
    return f"{cores:.2f}"


def format_share(share: float) -> str:
    """A share of the time, in percent."""
    return f"{100 * share:.0f} %" if share >= 0.1 or share == 0 else f"{100 * share:.1f} %"


class Scalars:
    """Collects steps and hands their means to `log`. What was not measured is left out."""

    def __init__(self, log: Log, every: int, sampler: Sampler | None) -> None:
        self._log, self._every, self._sampler = log, every, sampler
        self._rows: list[StepRow] = []

    def add(self, row: StepRow, num_steps: int) -> None:
        """Add a step; `num_steps` is how many there are by now."""
        self._rows.append(row)
        if len(self._rows) >= self._every:
            rows, self._rows = self._rows, []
            scalars = {**_of_steps(rows), **({} if self._sampler is None else _of_machine(self._sampler))}
            self._log({name: value for name, value in scalars.items() if math.isfinite(value)}, num_steps)


def _of_steps(rows: list[StepRow]) -> dict[str, float]:
    table = np.array(rows)
    is_known = np.isfinite(table)
    means = np.where(is_known, table, 0).sum(axis=0) / np.where(is_known.any(axis=0), is_known.sum(axis=0), np.nan)
    scalars = {name: float(means[COLUMNS[column]]) for column, name in _OF_STEPS.items()}
    both = scalars["data/wait_seconds"] + scalars["data/step_seconds"]
    return {"data/wait_share": scalars["data/wait_seconds"] / both, "data/steps_per_second": 1 / both, **scalars}


def _of_machine(sampler: Sampler) -> dict[str, float]:
    """Between the last two readings."""
    usage = sampler.history(last=2)
    if len(usage.time_seconds) < 2:
        return {}
    rates = usage.rates()
    return {
        "machine/training_cores": float(rates.root_cores[0]),
        "machine/worker_cores": float(rates.children_cores[0]),
        "machine/other_cores": float(rates.other_cores[0]),
        "machine/read_bytes_per_second": float(rates.read_bytes[0]),
        "machine/resident_bytes": float(usage.rss_bytes[-1]),
        "accelerator/utilization": float(usage.accelerator_utilization[-1]),
        "accelerator/memory_bytes": float(usage.accelerator_memory_bytes[-1]),
    }

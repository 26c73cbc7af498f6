"""Where the time of a batch goes, from a recording: one table of figures that remedies and findings read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.doctor._recording import Recording
from penstock.machine import EventKind

_SKIPPED = 3
"""First steps, in which pipelines fill."""
_UNEVEN = 2.5
_UNUSUAL = 10
"""Steps this many times as long as the median do more than train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCosts:
    """Seconds per batch of the baseline, unless the name says otherwise. 0 where nothing was seen."""

    num_steps: int
    wait: float
    """Mean, in the trainer."""
    step: float
    """Mean time from batch to batch, without the wait."""
    left_out: float
    """Part of all time that went to steps much longer than usual, as with validation."""
    step_cpu: float
    """Processor time of the training thread from batch to batch, what it takes to get one included."""
    fetch: float
    """Mean time to make a batch."""
    fetch_cpu: float
    """Of it, on a processor."""
    fetch_delay: float
    """Of it, ready to run and without a core."""
    slowest_tenth: float
    """Mean of the slowest tenth of batches, had they had a core whenever they were ready for one."""
    median_fetch: float
    """Likewise."""
    collate: float
    pack_cpu: float
    """Packing, on a processor."""
    start: float
    """Time to start an epoch: making the iterator, and waiting for the first batch."""
    sample: float
    """Mean seconds per sample."""
    slow_sample_share: float
    """Part of all sample time that the slowest 2 % take."""
    faults: float
    """Pages per batch waited for from disk."""
    delay: float
    """Run-queue delay of the training thread per step."""
    bytes: float
    """Of a batch."""
    padding: float
    """Share of tokens; 0 if batches have none."""

    @property
    def wait_share(self) -> float:
        """Part of the time that is spent waiting."""
        return self.wait / max(self.wait + self.step, 1e-9)

    @property
    def making(self) -> float:
        """Time to make a batch and pack it, with a core whenever one is wanted."""
        return max(0.0, self.fetch - self.fetch_delay) + self.pack_cpu

    @property
    def training(self) -> float:
        """Time of a step, with a core whenever one is wanted."""
        return max(self.step_cpu, self.step - self.delay)

    @property
    def is_uneven(self) -> bool:
        """Whether the slowest tenth of batches takes much longer than the median."""
        return self.slowest_tenth >= _UNEVEN * max(self.median_fetch, 1e-9)

    @property
    def cpu_share(self) -> float:
        """Part of making a batch that is spent on a processor."""
        return self.fetch_cpu / max(self.fetch, 1e-9)

    @property
    def waits_share(self) -> float:
        """Part of making a batch that needs no processor: sleep, disk, network, a lock."""
        return max(0.0, 1 - (self.fetch_cpu + self.fetch_delay) / max(self.fetch, 1e-9))


def measure_batch_costs(recording: Recording) -> BatchCosts:
    """Baseline figures of the loader that was experimented on."""
    nexts = recording.events_as_is(EventKind.NEXT)
    fetches = recording.events_as_is(EventKind.FETCH)
    samples = recording.events_as_is(EventKind.SAMPLE)
    waits = nexts["duration"][_SKIPPED:].astype(np.float64)
    all_gaps = _steps_between(nexts[_SKIPPED:])
    gaps = all_gaps[all_gaps <= _UNUSUAL * np.median(all_gaps)] if len(all_gaps) else all_gaps
    durations = fetches["duration"].astype(np.float64)
    undelayed = durations - _delays(fetches, recording.events_as_is(EventKind.DELAY))
    loader = None if recording.loader is None else recording.loader["loader"]
    batches = [each for each in recording.of("batch") if each["loader"] == loader]
    paddings = [each["padding"] for each in batches if each["padding"] is not None]
    reported = {} if recording.leader is None else recording.leader.get("told") or {}
    return BatchCosts(
        num_steps=len(nexts),
        wait=_mean(waits),
        step=_mean(gaps),
        left_out=float((all_gaps.sum() - gaps.sum()) / max(all_gaps.sum() + waits.sum(), 1e-9)),
        step_cpu=_mean(nexts["cpu"][_SKIPPED:]),
        fetch=_mean(durations) or reported.get("fetch", 0.0),
        fetch_cpu=_mean(fetches["cpu"]) or reported.get("fetch_cpu", 0.0),
        fetch_delay=_mean(durations - undelayed),
        slowest_tenth=_mean(np.sort(undelayed)[-max(1, len(undelayed) // 10) :]),
        median_fetch=float(np.median(undelayed)) if len(undelayed) else 0.0,
        collate=_mean(recording.events_as_is(EventKind.COLLATE)["duration"]),
        pack_cpu=_mean(recording.events_as_is(EventKind.PICKLE)["cpu"]),
        start=_start_seconds(recording, nexts),
        sample=_mean(samples["duration"]),
        slow_sample_share=_share_of_slowest(samples["duration"].astype(np.float64)),
        faults=_mean(fetches["extra"]) or reported.get("faults", 0.0),
        delay=_mean(nexts["extra"][_SKIPPED:]) / 1e9,
        bytes=_mean(np.array([each["bytes"] for each in batches])),
        padding=_mean(np.array(paddings)),
    )


def _delays(fetches: NDArray[np.void], delays: NDArray[np.void]) -> NDArray[np.float64]:
    """How long each batch waited for a core; most did not wait, and have no event."""
    known = {(event["worker"], event["start"]): event["value"] / 1e9 for event in delays}
    return np.array([known.get((event["worker"], event["start"]), 0.0) for event in fetches], np.float64)


def _mean(values: NDArray[np.generic]) -> float:
    return float(np.mean(values.astype(np.float64))) if len(values) else 0.0


def _steps_between(nexts: NDArray[np.void]) -> NDArray[np.float64]:
    """Time from a batch handed over to the next one asked for, of consecutive steps."""
    if len(nexts) < 2:
        return np.zeros(0)
    ends = nexts["start"] + (nexts["duration"].astype(np.float64) * 1e9).astype(np.int64)
    gaps = (nexts["start"][1:] - ends[:-1]) / 1e9
    consecutive = np.diff(nexts["sequence"]) == 1
    kept: NDArray[np.float64] = gaps[consecutive & (gaps >= 0)]
    return kept


def _share_of_slowest(durations: NDArray[np.float64]) -> float:
    if len(durations) < 50 or durations.sum() <= 0:
        return 0.0
    slowest = np.sort(durations)[-max(1, len(durations) // 50) :]
    return float(slowest.sum() / durations.sum())


def _start_seconds(recording: Recording, nexts: NDArray[np.void]) -> float:
    """Mean time to make an iterator and get its first batch, over epochs of the baseline."""
    starts = recording.events_as_is(EventKind.START)
    if not len(starts) or not len(nexts):
        return 0.0
    firsts = np.searchsorted(nexts["start"], starts["start"])
    known = firsts < len(nexts)
    return float(np.mean(starts["duration"][known] + nexts["duration"][firsts[known]])) if known.any() else 0.0

"""Where the time of a batch goes, and what to try: pure functions from a recording to figures, and to trials.

The most promising trial comes first. A model of the measured times only chooses: its ranking is right even where its
numbers are not, and a bad idea costs one turn.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.doctor._experiment import HEALTHY_BELOW, REPLAY, Trial, TrialKind, TurnResult, compare_with_baseline
from penstock.doctor._recording import Recording
from penstock.machine import EventKind
from penstock.tuning import name_of as written_options

_SKIPPED = 3
"""First steps, in which pipelines fill."""
_UNEVEN = 2.5
_UNUSUAL = 10
"""Steps this many times as long as the median do more than train."""
FIRST_NUMBER = 2
"""Of a trial that is chosen; baseline and replay come before."""
_MOST_TRIALS = 6
STARVING = 0.3
"""Share of the time spent waiting, from which on a change is tried before the ceiling is measured."""
_LARGE_BYTES = 2 << 20
_PADDED = 0.25
_WORTHWHILE = 0.1
"""Share of the time that doing without workers must save by arithmetic before it is tried: where it saved 4 % of a
compute-bound step, measuring alone took luck for a gain."""

Proposal = tuple[TrialKind, dict[str, Any]]


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
    store_wait: float
    """Time that workers waited for remote data, per batch; together they may wait longer than the batch takes."""
    store_rate: float
    """Bytes per second that the store delivered."""
    store_latency: float
    """How long it took to answer a request."""

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
        store_wait=reported.get("store_wait", 0.0),
        store_rate=reported.get("store_rate", 0.0),
        store_latency=reported.get("store_latency", 0.0),
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


def choose_trials(recording: Recording, turns: Sequence[TurnResult], *, whole_epochs: bool, cores: int) -> list[Trial]:
    """Trials for the loader that was looked at; when it does not wait for data, only those that change the step."""
    if recording.loader is None:
        return []
    costs, ceiling = measure_batch_costs(recording), compare_with_baseline(turns, REPLAY.number)
    proposals = list(_about_steps(recording, costs))
    if ceiling is None or ceiling.ratio >= HEALTHY_BELOW:
        if recording.loader["is_plan"]:
            proposals += _for_plans(recording, cores)
        else:
            proposals += _about_loading(recording, costs, cores, whole_epochs)
    unique = list({name_of(kind, changes): (kind, changes) for kind, changes in proposals}.items())
    return [
        Trial(number=number, name=name, kind=kind, changes=changes)
        for number, (name, (kind, changes)) in enumerate(unique[:_MOST_TRIALS], start=FIRST_NUMBER)
    ]


def choose_likeliest(recording: Recording, *, whole_epochs: bool, cores: int) -> Trial | None:
    """What should help most a loader that is clearly waited for; None if it is not, or nothing can be tried."""
    if recording.loader is None or measure_batch_costs(recording).wait_share < STARVING:
        return None
    trials = choose_trials(recording, (), whole_epochs=whole_epochs, cores=cores)
    likeliest = next((trial for trial in trials if not _is_about_steps(trial)), None)
    return None if likeliest is None else replace(likeliest, number=FIRST_NUMBER)


def _is_about_steps(trial: Trial) -> bool:
    return trial.kind == "grouped" or "batch_size" in trial.changes


def name_of(kind: TrialKind, changes: Mapping[str, Any]) -> str:
    """A trial as people write it."""
    match kind:
        case "penstock":
            return f"penstock.DataLoader({written_options(changes)})" if changes else "penstock.DataLoader"
        case "warm":
            return "data in memory"
        case "grouped":
            return "batches of similar lengths"
        case "threads":
            return f"torch.set_num_threads({changes['num_threads']})"
    return written_options(changes)


def _about_steps(recording: Recording, costs: BatchCosts) -> Iterator[Proposal]:
    """What changes the step: the shape of the batch."""
    assert recording.loader is not None
    batch_size = recording.loader["options"]["batch_size"]
    batches = [each for each in recording.of("batch") if each["loader"] == recording.loader["loader"]]
    if costs.padding >= _PADDED and all(each["can_regroup"] for each in batches):
        yield "grouped", {}
    if isinstance(batch_size, int) and batch_size > 16 and batch_size % 8 and not recording.loader["is_plan"]:
        multiple = 32 if batch_size > 32 else 16
        yield "options", {"batch_size": batch_size // multiple * multiple}
        yield "options", {"batch_size": -(-batch_size // 8) * 8}


def _about_loading(recording: Recording, costs: BatchCosts, cores: int, whole_epochs: bool) -> Iterator[Proposal]:
    """What changes how batches are made."""
    assert recording.loader is not None
    options = recording.loader["options"]
    workers = options["num_workers"]
    if costs.faults >= 1:
        yield "warm", {}
    if workers == 0:
        yield from _about_first_workers(costs, cores, whole_epochs)
        return
    if whole_epochs and not options["persistent_workers"]:
        yield "options", {"persistent_workers": True}
    if _saved_without_workers(costs) > _WORTHWHILE and costs.bytes < _LARGE_BYTES and not whole_epochs:
        yield "options", {"num_workers": 0}
    if workers * (1 - costs.waits_share) > cores:  # more of them are ready to run than can: that makes all uneven
        for count in dict.fromkeys((cores, max(1, cores // 2))):
            yield "options", {"num_workers": count}
    elif costs.is_uneven:
        yield from _about_uneven_batches(costs, options)
    yield from _about_trainer(recording.leader or {}, options, cores)
    if costs.bytes >= _LARGE_BYTES and recording.loader["kind"] == "torch":
        yield "penstock", {}
    for count in dict.fromkeys((_workers_needed(costs, cores), min(2 * workers, 4 * cores))):
        if count > workers:
            yield "options", {"num_workers": count}


def _saved_without_workers(costs: BatchCosts) -> float:
    """Part of the time that a training loop saves if it makes its batches itself instead of waiting for workers."""
    return (costs.wait - costs.making) / max(costs.wait + costs.step, 1e-9)


def _about_first_workers(costs: BatchCosts, cores: int, whole_epochs: bool) -> Iterator[Proposal]:
    """For a loader that has no workers yet."""
    keep = {"persistent_workers": True} if whole_epochs else {}
    needed = _workers_needed(costs, cores)
    for count in dict.fromkeys((needed, cores, 1)):
        yield "options", {"num_workers": count, **keep}
    if costs.is_uneven:
        yield "options", {"num_workers": needed, "prefetch_factor": _prefetch_needed(costs, needed), **keep}


def _about_uneven_batches(costs: BatchCosts, options: Mapping[str, Any]) -> Iterator[Proposal]:
    """More batches ahead, or any order of them, so that a slow one holds up nothing."""
    depth = _prefetch_needed(costs, options["num_workers"])
    is_deeper = depth > (options["prefetch_factor"] or 2)
    if is_deeper:
        yield "options", {"prefetch_factor": depth}
    if options["num_workers"] > 1 and options["in_order"]:
        yield "options", {"in_order": False}
        if is_deeper:
            yield "options", {"in_order": False, "prefetch_factor": depth}


def _about_trainer(trainer: Mapping[str, Any], options: Mapping[str, Any], cores: int) -> Iterator[Proposal]:
    """What the training process does with batches, and with the cores that workers leave it."""
    left = max(1, cores - options["num_workers"])
    if trainer.get("accelerator") and not options["pin_memory"]:
        yield "options", {"pin_memory": True}
    if trainer.get("cpu_share", 0) > 0.6 and trainer["num_threads"] > left:
        yield "threads", {"num_threads": left}


def _for_plans(recording: Recording, cores: int) -> Iterator[Proposal]:
    assert recording.loader is not None
    options, kind = recording.loader["options"], recording.loader["workers"]
    if kind in ("thread", "inline"):
        yield "options", {"workers": "process", "num_workers": cores}
        yield "options", {"workers": "process", "num_workers": max(1, cores - 1)}
    if kind == "inline":
        yield "options", {"workers": "thread", "num_workers": cores}
    elif kind != "remote" and options["num_workers"] < cores:
        yield "options", {"num_workers": cores}
    yield "options", {"prefetch": 4 * max(1, recording.loader["prefetched"])}


def _workers_needed(costs: BatchCosts, cores: int) -> int:
    """As many as keep up with the step: processors bound those that compute, not those that wait."""
    wanted = math.ceil(1.2 * costs.fetch / max(costs.step, 1e-4))
    bound = 4 * cores if costs.waits_share > 0.6 else cores
    return max(1, min(wanted, bound, 32))


def _prefetch_needed(costs: BatchCosts, workers: int) -> int:
    """Enough that a slow batch is under way before the trainer has used up the others."""
    depth = 1.5 * costs.slowest_tenth / max(costs.step, 1e-4)
    return int(min(64, max(4, math.ceil(depth / workers) + 1)))

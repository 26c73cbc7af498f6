"""Findings: a table of causes, each with what shows it, which change helps against it, and what people are told.

A cause is found when the recorded times and settings show it *and* a change against it made training faster. Its gain
is what trying the change gave; a change that did not help is never advised. To add one, add a row to `CAUSES`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from penstock.doctor._case import Case, Tried, percent
from penstock.doctor._experiment import FEWEST_ROUNDS, Trial
from penstock.errors import counted
from penstock.machine import EventKind
from penstock.report import Finding, Gain, format_bytes, format_gain, format_number, format_seconds
from penstock.tuning import name_of as written_options

_MOSTLY = 0.5
_PADDED = 0.25
_FEW_SAMPLES = 0.4
"""Share of the time in the slowest 2 % of samples."""


class Found(NamedTuple):
    """A finding, and what the verdict says after its title."""

    finding: Finding
    told: str


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One row of the table."""

    id: str
    title: Callable[[Case, Trial], str]
    is_shown: Callable[[Case], bool] = lambda case: True
    """Whether the recorded times and settings show it."""
    is_helped_by: Callable[[Case, Trial], bool]
    evidence: Callable[[Case, Trial], Iterable[str]]
    price: Callable[[Case, Trial], str] = lambda case, trial: "none"
    change: Callable[[Trial], str] = lambda trial: _call(trial)
    link: str = ""
    is_about_waiting: bool = True
    """Whether only a job that waits for data has it."""

    def find(self, case: Case) -> Found | None:
        """The finding with the change that helped most against it; None if nothing did."""
        tried = case.best(lambda trial: self.is_helped_by(case, trial))
        if tried is None or (self.is_about_waiting and not case.waits_for_data) or not self.is_shown(case):
            return None
        finding = replace(self._describe(case, tried.trial), gain=tried.comparison.gain)
        return Found(finding, f"With {tried.trial.name}, training was {format_gain(tried.comparison.gain)} faster.")

    def find_untried(self, case: Case) -> Found | None:
        """The finding with the change that should help most, if there was no time to measure one."""
        trial = next((trial for trial in case.untried if self.is_helped_by(case, trial)), None)
        if trial is None or self.id in _NOT_ABOUT_LOADING or not self.is_shown(case):
            return None
        finding = self._describe(case, trial)
        evidence = (*finding.evidence, *_about_time(case))
        slower = next((each for each in case.tried if each.trial.changes.keys() == trial.changes.keys()), None)
        said = f"{trial.name} should help"
        if case.promising is not None and trial == case.promising.trial:
            said = _about_promising(case.promising)
        elif slower is not None:
            said = (
                f"With {slower.trial.name}, training was {slower.comparison.ratio:.2f} × as fast; {trial.name} may help"
            )
        return Found(replace(finding, evidence=evidence, limit=case.limit), f"{said}, but {_why_untried(case)}.")

    def _describe(self, case: Case, trial: Trial) -> Finding:
        return Finding(
            id=self.id,
            title=self.title(case, trial),
            evidence=tuple(self.evidence(case, trial)),
            change=self.change(trial),
            where=case.loader["where"],
            price=self.price(case, trial),
            link=self.link,
        )


def find(case: Case) -> list[Found]:
    """All findings, by measured gain; those without one last. A job that waits for data has at least one about it."""
    rows = [
        *(cause.find(case) for cause in CAUSES),
        _slow_store(case),
        _padded_batches(case),
        _unequal_ranks(case),
        _growing_workers(case),
    ]
    found: dict[str, Found] = {}
    for each in rows:
        if each is not None:
            found.setdefault(each.finding.change, each)
    if case.waits_for_data and all(each.finding.id in _NOT_ABOUT_LOADING for each in found.values()):
        each = _costly_samples(case) if case.was_enough_tried else _find_untried(case)
        found[each.finding.change] = each
    return sorted(found.values(), key=lambda each: -(0.0 if each.finding.gain is None else each.finding.gain.ratio))


def _more_workers(case: Case, trial: Trial) -> bool:
    return bool(trial.changes.get("num_workers", 0) > case.num_workers)


def _other_workers(case: Case, trial: Trial) -> bool:
    return "num_workers" in trial.changes and trial.kind == "options"


def _smooths(case: Case, trial: Trial) -> bool:
    """Whether a trial evens out batches of uneven cost."""
    return any(name in trial.changes for name in ("prefetch_factor", "prefetch", "in_order", "num_workers"))


def _price_of_workers(case: Case, trial: Trial) -> str:
    more = trial.changes["num_workers"] - case.num_workers
    return f"memory of {more} more process{'es' if more != 1 else ''}"


def _price_of_prefetch(case: Case, trial: Trial) -> str:
    workers = trial.changes.get("num_workers", case.num_workers)
    depth = trial.changes.get("prefetch_factor", case.options["prefetch_factor"] or 2)
    more = max(0, workers * depth - case.loader["prefetched"]) * case.costs.bytes
    return f"up to {format_bytes(more)} of memory for batches" if more else "batches come in another order"


def _making(case: Case) -> str:
    return f"A batch takes {format_seconds(case.costs.fetch)} to make, a step {format_seconds(case.costs.step)}."


def _has_slow_samples(case: Case) -> bool:
    if case.costs.slow_sample_share < _FEW_SAMPLES:
        return False
    samples = case.recording.events_as_is(EventKind.SAMPLE)["duration"]
    return bool(np.sort(samples)[-max(1, len(samples) // 200)] >= case.costs.step)


def _about_slow_samples(case: Case, trial: Trial) -> Iterable[str]:
    samples = case.recording.events_as_is(EventKind.SAMPLE)
    slowest = samples[np.argsort(samples["duration"])[-5:]][::-1]
    named = ", ".join(str(index) for index in slowest["value"] if index >= 0)
    yield (
        f"The slowest 2 % of samples take {percent(case.costs.slow_sample_share)} of the time; the slowest took "
        f"{format_seconds(float(slowest['duration'][0]))}, the middle one "
        f"{format_seconds(float(np.median(samples['duration'])))}." + (f" Slowest: {named}." if named else "")
    )
    yield f"{percent(case.costs.waits_share)} of making a batch is waiting, not computing."


def _is_uneven(case: Case) -> bool:
    """Single batches of a plan are not timed: that they are uneven shows in what helps most."""
    if case.loader["is_plan"]:
        return bool(case.helped) and "prefetch" in case.helped[0].trial.changes
    return case.costs.is_uneven and case.num_workers > 0


def _about_uneven_batches(case: Case, trial: Trial) -> Iterable[str]:
    costs, ahead = case.costs, case.loader["prefetched"]
    if not case.loader["is_plan"]:
        yield (
            f"Half of the batches take less than {format_seconds(costs.median_fetch)}, the slowest tenth "
            f"{format_seconds(costs.slowest_tenth)}."
        )
    yield f"At most {ahead} batches are ready, {format_seconds(ahead * costs.step)} of training."


def _about_disk(case: Case, trial: Trial) -> Iterable[str]:
    yield (
        f"Each batch waits for {format_number(case.costs.faults)} pages that are not in memory; "
        f"{percent(case.costs.waits_share)} of making a batch is waiting, not computing."
    )
    where = "The same samples from the page cache" if trial.kind == "warm" else "More reads at a time"
    yield f"{where} were that much faster."


def _about_torch_threads(case: Case, trial: Trial) -> Iterable[str]:
    threads = (case.recording.leader or {}).get("num_threads", 0)
    yield (
        f"{threads} threads of the trainer and {case.num_workers} workers share {case.cores} cores; the training "
        f"thread waited {format_seconds(case.costs.delay)} of each step for one."
    )


def _call(trial: Trial) -> str:
    return f"DataLoader(..., {written_options(trial.changes)})"


CAUSES = (
    Cause(
        id="cold-reads",
        title=lambda case, trial: "Samples wait for the disk",
        is_shown=lambda case: case.costs.faults >= 1,
        is_helped_by=lambda case, trial: trial.kind == "warm" or _more_workers(case, trial),
        evidence=_about_disk,
        change=lambda trial: (
            "keep the data in memory (read it once at the start), or read it in the order in which it is stored: "
            "penstock.open(...).shuffle()"
            if trial.kind == "warm"
            else _call(trial)
        ),
        price=lambda case, trial: (
            "the data's size in memory" if trial.kind == "warm" else _price_of_workers(case, trial)
        ),
        link="docs/guide/pages.md#why-sequential",
    ),
    Cause(
        id="workers-restart",
        title=lambda case, trial: "Workers are restarted for each short epoch",
        is_helped_by=lambda case, trial: list(trial.changes) == ["persistent_workers"],
        evidence=lambda case, trial: (
            f"A step takes {format_seconds(case.costs.step + case.costs.wait)}, and each epoch "
            f"{format_seconds(case.costs.start)} more before its first batch is there.",
        ),
        price=lambda case, trial: "workers keep their memory between epochs",
    ),
    Cause(
        id="gil-threads",
        title=lambda case, trial: "Python code in the trainer's threads runs one thread at a time",
        is_shown=lambda case: case.loader["workers"] in ("thread", "inline"),
        is_helped_by=lambda case, trial: trial.changes.get("workers") == "process",
        evidence=lambda case, trial: (
            f"{case.num_workers} threads of the training process make the batches; they and the training loop share "
            "one interpreter lock. Worker processes have a lock each.",
            f"A batch takes a thread {format_seconds(case.costs.fetch)}, of which "
            f"{format_seconds(case.costs.fetch_cpu)} are computing.",
        ),
        price=lambda case, trial: "memory for each worker process",
    ),
    Cause(
        id="too-many-workers",
        title=lambda case, trial: f"{case.num_workers} workers are too many for {case.cores} cores",
        is_shown=lambda case: case.num_workers > case.cores,
        is_helped_by=lambda case, trial: 0 < trial.changes.get("num_workers", case.num_workers) < case.num_workers,
        evidence=lambda case, trial: (
            f"A batch takes {format_seconds(case.costs.fetch)} to make: {format_seconds(case.costs.fetch_cpu)} of it "
            f"computing, {format_seconds(case.costs.fetch_delay)} ready to run and without a core.",
            f"The training thread was ready but had no core for {format_seconds(case.costs.delay)} of each step.",
        ),
        price=lambda case, trial: "none; it frees memory",
        is_about_waiting=False,
    ),
    Cause(
        id="needless-workers",
        title=lambda case, trial: "Workers hand batches over for longer than it takes to make them",
        is_shown=lambda case: case.num_workers > 0 and not case.loader["is_plan"],
        is_helped_by=lambda case, trial: trial.changes.get("num_workers") == 0,
        evidence=lambda case, trial: (
            f"A batch takes {format_seconds(case.costs.making)} to make, and each step waits "
            f"{format_seconds(case.costs.wait)} for one: the rest of the wait is its way here from another process.",
        ),
        price=lambda case, trial: "none; it frees memory",
        is_about_waiting=False,
    ),
    Cause(
        id="hand-over",
        title=lambda case, trial: "Large batches cost much on their way from the workers",
        is_helped_by=lambda case, trial: trial.kind == "penstock",
        evidence=lambda case, trial: (
            f"A batch has {format_bytes(case.costs.bytes)}. Torch allocates shared memory for each, and the kernel "
            "clears and maps every page of it again.",
            "Penstock's loader writes into memory that is used again.",
        ),
        change=lambda trial: "from penstock import DataLoader",
        link="docs/drop-in.md",
    ),
    Cause(
        id="slow-samples",
        title=lambda case, trial: "A few slow samples hold up the batches behind them",
        is_shown=_has_slow_samples,
        is_helped_by=_smooths,
        evidence=_about_slow_samples,
        price=_price_of_prefetch,
    ),
    Cause(
        id="heavy-collate",
        title=lambda case, trial: "Collating takes most of a batch's time",
        is_shown=lambda case: case.costs.collate >= _MOSTLY * case.costs.fetch,
        is_helped_by=_other_workers,
        evidence=lambda case, trial: (
            f"collate_fn takes {format_seconds(case.costs.collate)} of a batch's {format_seconds(case.costs.fetch)}.",
            "More workers hide it; a collate_fn without a loop over samples removes it.",
        ),
        price=_price_of_workers,
    ),
    Cause(
        id="small-prefetch",
        title=lambda case, trial: "Prefetch is too small for how uneven the batches are",
        is_shown=_is_uneven,
        is_helped_by=_smooths,
        evidence=_about_uneven_batches,
        price=_price_of_prefetch,
    ),
    Cause(
        id="no-workers",
        title=lambda case, trial: "Batches are made in the training process (num_workers=0)",
        is_shown=lambda case: case.num_workers == 0 and not case.loader["is_plan"],
        is_helped_by=_other_workers,
        evidence=lambda case, trial: (
            f"Each step waits {format_seconds(case.costs.wait)} for its batch, and computes for "
            f"{format_seconds(case.costs.step)}.",
            f"A sample takes {format_seconds(case.costs.sample)}, {percent(case.costs.cpu_share)} of it on a "
            "processor.",
        ),
        price=_price_of_workers,
    ),
    Cause(
        id="few-workers",
        title=lambda case, trial: f"{case.num_workers} worker{'s do' if case.num_workers > 1 else ' does'} not keep up",
        is_shown=lambda case: case.num_workers > 0,
        is_helped_by=_more_workers,
        evidence=lambda case, trial: (_making(case),),
        price=_price_of_workers,
    ),
    Cause(
        id="odd-batch-size",
        title=lambda case, trial: (
            f"A batch of {case.options['batch_size']} computes slower per sample than one of "
            f"{trial.changes['batch_size']}"
        ),
        is_helped_by=lambda case, trial: "batch_size" in trial.changes,
        evidence=lambda case, trial: (
            f"Kernels work in blocks of 8, 16 or 32 rows, and {case.options['batch_size']} rows leave the last block "
            "nearly empty.",
            "The gain is in samples per second.",
        ),
        price=lambda case, trial: "another batch size: look at the learning rate",
        is_about_waiting=False,
    ),
    Cause(
        id="torch-threads",
        title=lambda case, trial: "Torch's threads and the workers compete for cores",
        is_helped_by=lambda case, trial: trial.kind == "threads",
        evidence=_about_torch_threads,
        change=lambda trial: trial.name,
        is_about_waiting=False,
    ),
)
"""The most specific causes first: of two that advise the same change, the first is reported."""
_MOSTLY_STORE = 0.3
"""Part of the waiting for which each worker waits for remote data, above which that is the cause."""
_UNEQUAL = 1.1
"""The cost of the dearest rank, relative to what it would be with rows dealt by cost, above which it is told."""
_NOT_ABOUT_LOADING = {"padding", "odd-batch-size", "torch-threads", "unequal-ranks", "growing-workers"}


def _slow_store(case: Case) -> Found | None:
    """Remote data comes slower than it is needed."""
    costs = case.costs
    workers = max(1, case.num_workers)
    if not case.waits_for_data or costs.store_wait < _MOSTLY_STORE * workers * costs.wait:
        return None
    finding = Finding(
        id="slow-store",
        title="The store delivers slower than the data is needed",
        evidence=(
            f"Workers waited {format_seconds(costs.store_wait)} for shards in each batch.",
            f"The store gave {format_bytes(costs.store_rate)}/s, and took {format_seconds(costs.store_latency)} to "
            "answer a request of up to 8 MiB.",
        ),
        change="cache_bytes= as large as the node's part of the data, shuffle(lanes=) to make that part smaller, or "
        "penstock stage before the run; penstock simulate says what each would fetch",
        where=case.loader["where"],
        limit=case.limit,
        link="docs/how-to/s3.md#3-train-from-there",
    )
    return Found(finding, f"Without waiting, training would be at most {format_gain(case.limit)} faster.")


def _padded_batches(case: Case) -> Found | None:
    """Much of what the model computes is padding."""
    share = case.costs.padding
    tried = case.best(lambda trial: trial.kind == "grouped")
    if share < _PADDED or (tried is None and share < _MOSTLY):
        return None
    limit = Gain(ratio=1 / max(1e-3, 1 - share))
    finding = Finding(
        id="padding",
        title=f"{percent(share)} of the tokens are padding",
        evidence=(
            f"Nothing is learned from {format_number(100 * share)} in 100 tokens, and the model computes them all.",
            "Batches of rows of similar lengths were tried; packing documents into full rows leaves no padding.",
        ),
        change="pack instead of pad: penstock.open(...).pack(length), or group batches by length",
        where=case.loader["where"],
        limit=limit,
        link="docs/guide/packing.md",
    )
    if tried is None:
        return Found(finding, f"Without it, training would be at most {format_gain(limit)} faster.")
    gain = tried.comparison.gain
    return Found(replace(finding, gain=gain), f"With {tried.trial.name}, training was {format_gain(gain)} faster.")


def _unequal_ranks(case: Case) -> Found | None:
    """Ranks wait for the one with the longest documents."""
    ratio = 0.0 if case.recording.leader is None else case.recording.leader.get("imbalance") or 0.0
    if ratio < _UNEQUAL:
        return None
    limit = Gain(ratio=ratio)
    finding = Finding(
        id="unequal-ranks",
        title="Ranks wait for the one with the longest documents",
        evidence=(
            f"In a step, the attention of the dearest rank costs {ratio:.2f} times what it would with the same rows "
            "dealt by cost.",
            "No rank goes on before the last one is ready; plan.imbalance(world_size) shows other steps and costs.",
        ),
        change='deal rows by cost: plan.batch(..., balance="attention")',
        where=case.loader["where"],
        limit=limit,
        link="docs/plans.md#equal-work-for-every-rank",
    )
    return Found(
        finding, f"With it, training would be at most {format_gain(limit)} faster: by as much of it as is attention."
    )


def _growing_workers(case: Case) -> Found | None:
    """Each worker makes copies of pages that it should share."""
    first, last = case.worker_memory
    is_forked = case.loader["context"] in (None, "fork")
    if not case.num_workers or not is_forked or case.worker_growth <= 0:
        return None
    finding = Finding(
        id="growing-workers",
        title="Workers copy the dataset little by little",
        evidence=(
            f"A worker's own memory grew from {format_bytes(first)} to {format_bytes(last)}, by "
            f"{format_bytes(case.worker_growth)} per second; there are {case.num_workers}.",
            "Reading a Python object changes its reference count, and the page that was shared becomes a copy.",
        ),
        change="keep samples in arrays (numpy, Arrow, penstock.from_arrays), not in lists and dicts of Python objects",
        where=case.loader["where"],
        price="none; it saves a copy of the dataset per worker",
        link="docs/guide/map-datasets.md#if-it-fits-in-memory-keep-it-there",
    )
    return Found(finding, f"Each grows by {format_bytes(case.worker_growth)} per second.")


def _costly_samples(case: Case) -> Found:
    """It waits for data, and nothing that could be tried helps."""
    costs = case.costs
    evidence: tuple[str, ...] = (
        f"A batch takes {format_seconds(costs.fetch)} to make ({format_seconds(costs.fetch_cpu)} computing), "
        f"a step {format_seconds(costs.step)}. No setting that was tried helped.",
    )
    if case.has_neighbours:
        evidence += (
            f"Other programs used {case.other_cores:.1f} of the {case.cores} cores: with these to itself, the job may "
            "gain from settings that did not help here.",
        )
    finding = Finding(
        id="costly-samples",
        title="The machine has too few cores for what its samples cost",
        evidence=evidence,
        change="do the costly part of the transform once, in penstock.prepare",
        where=case.loader["where"],
        limit=case.limit,
        link="docs/guide/ahead.md",
    )
    return Found(finding, f"Without waiting, training would be at most {format_gain(case.limit)} faster.")


def _find_untried(case: Case) -> Found:
    """It waits for data, and there was no time to find out what helps: the cause is what times and settings show."""
    found = next((each for cause in CAUSES if (each := cause.find_untried(case)) is not None), None)
    if found is not None:
        return found
    finding = Finding(
        id="nothing-tried",
        title="There was no time to find out what would help",
        evidence=(_making(case), *_about_time(case)),
        change=_how_to_go_on(case),
        limit=case.limit,
    )
    return Found(finding, f"Without waiting, training would be at most {format_gain(case.limit)} faster.")


def _about_time(case: Case) -> Iterable[str]:
    if case.promising is not None:
        yield f"{_about_promising(case.promising)}."
    needs = "" if case.is_finished else f"a gain needs {FEWEST_ROUNDS} turns, and "
    said = f"{needs}{_why_untried(case)}: {_how_to_go_on(case)}."
    yield said[0].upper() + said[1:]


def _about_promising(tried: Tried) -> str:
    gain, turns = tried.comparison.gain, counted(tried.comparison.num_rounds, "turn")
    return f"With {tried.trial.name}, training was {format_gain(gain)} faster in {turns}"


def _why_untried(case: Case) -> str:
    if case.is_observed:
        return "nothing was to be tried"
    if case.is_finished:
        return "that is within the noise here"
    if case.recording.has("done"):
        return "time ran out before that was certain"
    num_steps = int((case.recording.events["kind"] == EventKind.NEXT).sum())
    return f"the script ended after {num_steps:,} steps, before that was certain"


def _how_to_go_on(case: Case) -> str:
    if case.is_observed:
        return "leave out --observe"
    if case.is_finished:
        return "try again while other programs use less of the machine"
    if case.recording.has("done"):
        return "give the doctor more time, --seconds 120 or more"
    return "run it again with --repeat, or for more steps"

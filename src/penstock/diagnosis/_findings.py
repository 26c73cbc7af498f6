"""Findings: each a pure function from a case to one finding, or to none.

A finding has a cause, which the recorded times show, and a change. Its gain is what trying the change gave; no
change that did not help is ever advised. Add a function here, and to `FINDINGS`, to add a finding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from penstock.diagnosis._case import Case, Tried
from penstock.diagnosis._experiment import Trial
from penstock.metrics import EventKind
from penstock.report import Finding, Gain, format_bytes, format_number, format_seconds

_MOSTLY = 0.5
_UNEVEN = 2.5


def cold_reads(case: Case) -> Finding | None:
    """Samples wait for pages from disk, and the same samples from memory do not."""
    found = case.best(lambda trial: trial.kind == "warm")
    if found is None or not case.waits_for_data:
        return None
    return _finding(
        case,
        found,
        id="cold-reads",
        title="Samples wait for the disk",
        evidence=(
            f"Each batch waits for {format_number(case.stages.faults)} pages that are not in memory; "
            f"{_percent(case.stages.waits_share)} of making a batch is waiting, not computing.",
            "The same samples again, from the page cache, were that much faster.",
        ),
        change="keep the data in memory (read it once at the start), or read it in the order in which it is stored: "
        "penstock.open(...).shuffle()",
        price="the data's size in memory",
        link="docs/plans.md",
    )


def workers_restart(case: Case) -> Finding | None:
    """Epochs are short, and each starts its workers anew."""
    found = case.best(lambda trial: list(trial.changes) == ["persistent_workers"])
    if found is None or not case.waits_for_data:
        return None
    length = case.loader["length"]
    return _finding(
        case,
        found,
        id="workers-restart",
        title="Workers are started anew for each short epoch",
        evidence=(
            f"An epoch of {length} steps takes {format_seconds(length * (case.stages.step + case.stages.wait))}"
            f" of steps, and {format_seconds(case.stages.start)} more before its first batch is there.",
        ),
        change=_call(found.trial),
        price="workers keep their memory between epochs",
    )


def threads_share_one_lock(case: Case) -> Finding | None:
    """Threads of the trainer compute with Python, one at a time."""
    found = case.best(lambda trial: trial.changes.get("workers") == "process")
    if found is None or not case.waits_for_data or case.loader["workers"] not in ("thread", "inline"):
        return None
    return _finding(
        case,
        found,
        id="gil-threads",
        title="Python code in the trainer's threads runs one thread at a time",
        evidence=(
            f"{case.options['num_workers']} threads of the training process make the batches; they and the training "
            "loop share one interpreter lock.",
            "Worker processes have a lock each.",
        ),
        change=_call(found.trial),
        price="memory for each worker process",
    )


def too_many_workers(case: Case) -> Finding | None:
    """More workers than cores, and fewer are faster."""
    workers = case.options["num_workers"]
    found = case.best(lambda trial: 0 < trial.changes.get("num_workers", workers) < workers)
    if found is None or workers <= case.cores:
        return None
    return _finding(
        case,
        found,
        id="too-many-workers",
        title=f"{workers} workers are too many for {case.cores} cores",
        evidence=(
            f"A batch takes {format_seconds(case.stages.fetch)} to make, {format_seconds(case.stages.fetch_cpu)} of it "
            "computing; the rest is waiting for a core.",
            f"The training thread was ready but had no core for {format_seconds(case.stages.delay)} of each step.",
        ),
        change=_call(found.trial),
        price="none; it frees memory",
    )


def slow_samples(case: Case) -> Finding | None:
    """A few samples take most of the time, and ready batches wait behind them."""
    found = case.best(_is_smoothing)
    if found is None or not case.waits_for_data or case.stages.slow_sample_share < 0.4:
        return None
    samples = case.recording.events_as_is(EventKind.SAMPLE)
    if np.sort(samples["duration"])[-max(1, len(samples) // 100)] < case.stages.step:
        return None
    slowest = samples[np.argsort(samples["duration"])[-5:]][::-1]
    named = ", ".join(str(index) for index in slowest["value"] if index >= 0)
    return _finding(
        case,
        found,
        id="slow-samples",
        title="A few slow samples hold up the batches behind them",
        evidence=(
            f"The slowest 2 % of samples take {_percent(case.stages.slow_sample_share)} of the time; the slowest took "
            f"{format_seconds(float(slowest['duration'][0]))}, the middle one "
            f"{format_seconds(float(np.median(samples['duration'])))}." + (f" Slowest: {named}." if named else ""),
            f"{_percent(case.stages.waits_share)} of making a batch is waiting, not computing.",
        ),
        change=_call(found.trial),
        price=_price_of_prefetch(case, found.trial),
    )


def small_prefetch(case: Case) -> Finding | None:
    """Batches differ in cost by more than the prefetched ones can bridge."""
    found = case.best(_is_smoothing)
    stages = case.stages
    is_uneven = stages.unevenness >= _UNEVEN or case.loader["is_plan"]
    if found is None or not case.waits_for_data or not is_uneven or case.options["num_workers"] == 0:
        return None
    ahead = case.loader["prefetched"]
    return _finding(
        case,
        found,
        id="small-prefetch",
        title="Prefetch is too small for how uneven the batches are",
        evidence=(
            f"Half of the batches take less than {format_seconds(stages.median_fetch)}, the slowest tenth "
            f"{format_seconds(stages.slowest_tenth)}.",
            f"At most {ahead} batches are ready, {format_seconds(ahead * stages.step)} of training.",
        ),
        change=_call(found.trial),
        price=_price_of_prefetch(case, found.trial),
    )


def heavy_collate(case: Case) -> Finding | None:
    """Making a batch of samples takes longer than reading them."""
    found, stages = case.best(_is_about_workers), case.stages
    if found is None or not case.waits_for_data or stages.collate < _MOSTLY * stages.fetch:
        return None
    return _finding(
        case,
        found,
        id="heavy-collate",
        title="Collating takes most of a batch's time",
        evidence=(
            f"collate_fn takes {format_seconds(stages.collate)} of a batch's {format_seconds(stages.fetch)}.",
            "More workers hide it; a collate_fn without a loop over samples removes it.",
        ),
        change=_call(found.trial),
        price=_price_of_workers(case, found.trial),
    )


def no_workers(case: Case) -> Finding | None:
    """The training loop makes its batches itself."""
    found, stages = case.best(_is_about_workers), case.stages
    if found is None or not case.waits_for_data or case.options["num_workers"] > 0 or case.loader["is_plan"]:
        return None
    return _finding(
        case,
        found,
        id="no-workers",
        title="The training loop makes its batches itself",
        evidence=(
            f"num_workers=0: each step waits {format_seconds(stages.wait)} for its batch, and computes for "
            f"{format_seconds(stages.step)}.",
            f"A sample takes {format_seconds(stages.sample)}, {_percent(1 - stages.waits_share)} of it on a processor.",
        ),
        change=_call(found.trial),
        price=_price_of_workers(case, found.trial),
    )


def few_workers(case: Case) -> Finding | None:
    """Workers do not keep up, and more of them do."""
    workers = case.options["num_workers"]
    found = case.best(lambda trial: trial.changes.get("num_workers", 0) > workers)
    if found is None or not case.waits_for_data or workers == 0:
        return None
    return _finding(
        case,
        found,
        id="few-workers",
        title=f"{workers} worker{'s do' if workers > 1 else ' does'} not keep up",
        evidence=(
            f"A batch takes {format_seconds(case.stages.fetch)} to make, a step {format_seconds(case.stages.step)}.",
        ),
        change=_call(found.trial),
        price=_price_of_workers(case, found.trial),
    )


def costly_hand_over(case: Case) -> Finding | None:
    """Large batches cross from workers to the trainer, and Penstock's way is faster."""
    found = case.best(lambda trial: trial.kind == "penstock")
    if found is None or not case.waits_for_data:
        return None
    return _finding(
        case,
        found,
        id="hand-over",
        title="Large batches cost much on their way from the workers",
        evidence=(
            f"A batch has {format_bytes(case.stages.bytes)}. Torch allocates shared memory for each, and the kernel "
            "clears and maps every page of it again.",
            "Penstock's loader writes into memory that is used again.",
        ),
        change="from penstock import DataLoader",
        price="none",
        link="docs/drop-in.md",
    )


def padded_batches(case: Case) -> Finding | None:
    """Much of what the model computes is padding."""
    share = case.stages.padding
    found = case.best(lambda trial: trial.kind == "grouped")
    if share < 0.25 or (found is None and share < _MOSTLY):
        return None
    finding = Finding(
        id="padding",
        title=f"{_percent(share)} of the tokens are padding",
        evidence=(
            f"Of {format_number(100 * share)} in 100 tokens nothing is learned, and the model computes them all.",
            "Batches of rows of similar lengths were tried; packing documents into full rows leaves no padding.",
        ),
        change="pack instead of pad: penstock.open(...).pack(length), or group batches by length",
        where=case.loader["where"],
        limit=Gain(ratio=1 / max(1e-3, 1 - share)),
        link="docs/plans.md",
    )
    if found is None:
        return finding
    return _with_gain(finding, found)


def odd_batch_size(case: Case) -> Finding | None:
    """A batch size that kernels do not like."""
    found = case.best(lambda trial: "batch_size" in trial.changes)
    if found is None:
        return None
    size = case.options["batch_size"]
    return _finding(
        case,
        found,
        id="odd-batch-size",
        title=f"A batch of {size} computes slower per sample than one of {found.trial.changes['batch_size']}",
        evidence=(
            f"Kernels work in blocks of 8, 16 or 32 rows, and {size} rows leave the last block nearly empty.",
            "The gain is in samples per second.",
        ),
        change=_call(found.trial),
        price="another batch size: look at the learning rate",
    )


def torch_threads(case: Case) -> Finding | None:
    """Torch's threads in the trainer and the workers want the same cores."""
    found = case.best(lambda trial: trial.kind == "threads")
    if found is None:
        return None
    threads = (case.recording.leader or {}).get("num_threads", 0)
    return _finding(
        case,
        found,
        id="torch-threads",
        title="Torch's threads and the workers compete for cores",
        evidence=(
            f"{threads} threads of the trainer and {case.options['num_workers']} workers share {case.cores} cores; the "
            f"training thread waited {format_seconds(case.stages.delay)} of each step for one.",
        ),
        change=found.trial.name,
        price="none",
    )


def growing_workers(case: Case) -> Finding | None:
    """Each worker makes copies of pages that it should share."""
    first, last = case.worker_memory
    workers = case.options["num_workers"]
    is_forked = case.loader["context"] in (None, "fork")
    if not workers or not is_forked or case.worker_growth <= 0:
        return None
    return Finding(
        id="growing-workers",
        title="Workers copy the dataset little by little",
        evidence=(
            f"A worker's own memory grew from {format_bytes(first)} to {format_bytes(last)}, by "
            f"{format_bytes(case.worker_growth)} per second; there are {workers}.",
            "Reading a Python object changes its reference count, and the page that was shared becomes a copy.",
        ),
        change="keep samples in arrays (numpy, Arrow, penstock.from_arrays), not in lists and dicts of Python objects",
        where=case.loader["where"],
        price="none; it saves a copy of the dataset per worker",
        link="docs/drop-in.md",
    )


def costly_samples(case: Case) -> Finding | None:
    """It waits for data, and nothing that could be tried helps."""
    ceiling = case.recording.ceiling
    if not case.waits_for_data or ceiling is None:
        return None
    stages = case.stages
    return Finding(
        id="costly-samples",
        title="Samples cost more than the machine has cores for",
        evidence=(
            f"A batch takes {format_seconds(stages.fetch)} to make ({format_seconds(stages.fetch_cpu)} computing), "
            f"a step {format_seconds(stages.step)}. No setting that was tried helped.",
        ),
        change="do the costly part of the transform once, in penstock.prepare",
        where=case.loader["where"],
        limit=ceiling.gain,
        link="docs/preparation.md",
    )


FINDINGS: tuple[Callable[[Case], Finding | None], ...] = (
    cold_reads,
    workers_restart,
    threads_share_one_lock,
    too_many_workers,
    costly_hand_over,
    slow_samples,
    heavy_collate,
    small_prefetch,
    no_workers,
    few_workers,
    padded_batches,
    odd_batch_size,
    torch_threads,
    growing_workers,
)
"""The most specific causes first: of two that advise the same change, the first is told."""
_NOT_ABOUT_LOADING = {"padding", "odd-batch-size", "torch-threads", "growing-workers"}


def find(case: Case) -> list[Finding]:
    """All findings, by measured gain; those without one last. Whoever waits for data is told something about it."""
    told: dict[str, Finding] = {}
    for function in FINDINGS:
        finding = function(case)
        if finding is not None:
            told.setdefault(finding.change, finding)
    fallback = costly_samples(case)
    if fallback is not None and all(each.id in _NOT_ABOUT_LOADING for each in told.values()):
        told[fallback.change] = fallback
    return sorted(told.values(), key=lambda each: -(each.gain.ratio if each.gain is not None else 0.0))


def _finding(
    case: Case,
    found: Tried,
    *,
    id: str,
    title: str,
    evidence: tuple[str, ...],
    change: str,
    price: str,
    link: str = "",
) -> Finding:
    gain, where = found.estimate.gain, case.loader["where"]
    return Finding(id=id, title=title, evidence=evidence, change=change, where=where, price=price, gain=gain, link=link)


def _with_gain(finding: Finding, found: Tried) -> Finding:
    return dataclasses.replace(finding, gain=found.estimate.gain)


def _call(trial: Trial) -> str:
    written = ", ".join(f"{name}={value!r}" for name, value in trial.changes.items())
    return f"DataLoader(..., {written})"


def _is_smoothing(trial: Trial) -> bool:
    return any(name in trial.changes for name in ("prefetch_factor", "prefetch", "in_order", "num_workers"))


def _is_about_workers(trial: Trial) -> bool:
    return "num_workers" in trial.changes and trial.kind == "options"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _price_of_prefetch(case: Case, trial: Trial) -> str:
    workers = trial.changes.get("num_workers", case.options["num_workers"])
    depth = trial.changes.get("prefetch_factor", case.options["prefetch_factor"] or 2)
    more = max(0, workers * depth - case.loader["prefetched"]) * case.stages.bytes
    return f"up to {format_bytes(more)} of memory for batches" if more else "batches come in another order"


def _price_of_workers(case: Case, trial: Trial) -> str:
    more = trial.changes["num_workers"] - case.options["num_workers"]
    return f"memory of {more} more process{'es' if more != 1 else ''}"

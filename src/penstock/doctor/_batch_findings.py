"""Findings about what batches are made of: where samples come from, what they cost, and their shape.

Each is a pure function from a case to one finding, or to none; `_diagnosis.FINDINGS` sets their order.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from penstock.doctor._case import Case, Tried, is_about_workers, is_smoothing, percent
from penstock.doctor._experiment import FEWEST_ROUNDS
from penstock.errors import counted
from penstock.machine import EventKind
from penstock.report import Finding, Gain, format_bytes, format_number, format_seconds

NOTHING_TRIED = "nothing-tried"
_MOSTLY = 0.5


def cold_reads(case: Case) -> Finding | None:
    """Samples wait for pages from disk; in memory, or read by more workers at a time, they do so less."""
    workers = case.options["num_workers"]
    found = case.best(lambda trial: trial.kind == "warm" or trial.changes.get("num_workers", 0) > workers)
    if found is None or not case.waits_for_data or case.stages.faults < 1:
        return None
    warm = found.trial.kind == "warm"
    return case.advise(
        found,
        id="cold-reads",
        title="Samples wait for the disk",
        evidence=(
            f"Each batch waits for {format_number(case.stages.faults)} pages that are not in memory; "
            f"{percent(case.stages.waits_share)} of making a batch is waiting, not computing.",
            f"{'The same samples from the page cache' if warm else 'More reads at a time'} were that much faster.",
        ),
        change="keep the data in memory (read it once at the start), or read it in the order in which it is stored: "
        "penstock.open(...).shuffle()"
        if warm
        else "",
        price="the data's size in memory" if warm else case.price_of_workers(found.trial),
        link="docs/guide/pages.md#why-sequential",
    )


def slow_samples(case: Case) -> Finding | None:
    """A few samples take most of the time, and ready batches wait behind them."""
    found = case.best(is_smoothing)
    if found is None or not case.waits_for_data or case.stages.slow_sample_share < 0.4:
        return None
    samples = case.recording.events_as_is(EventKind.SAMPLE)
    if np.sort(samples["duration"])[-max(1, len(samples) // 200)] < case.stages.step:
        return None
    slowest = samples[np.argsort(samples["duration"])[-5:]][::-1]
    named = ", ".join(str(index) for index in slowest["value"] if index >= 0)
    return case.advise(
        found,
        id="slow-samples",
        title="A few slow samples hold up the batches behind them",
        evidence=(
            f"The slowest 2 % of samples take {percent(case.stages.slow_sample_share)} of the time; the slowest took "
            f"{format_seconds(float(slowest['duration'][0]))}, the middle one "
            f"{format_seconds(float(np.median(samples['duration'])))}." + (f" Slowest: {named}." if named else ""),
            f"{percent(case.stages.waits_share)} of making a batch is waiting, not computing.",
        ),
        price=case.price_of_prefetch(found.trial),
    )


def small_prefetch(case: Case) -> Finding | None:
    """Batches differ in cost by more than the prefetched ones can bridge."""
    if case.loader["is_plan"]:
        return _small_prefetch_of_plan(case)
    found, stages = case.best(is_smoothing), case.stages
    if found is None or not case.waits_for_data or not stages.is_uneven or case.options["num_workers"] == 0:
        return None
    uneven = (
        f"Half of the batches take less than {format_seconds(stages.median_fetch)}, the slowest tenth "
        f"{format_seconds(stages.slowest_tenth)}."
    )
    return _advise_prefetch(case, found, uneven)


def _small_prefetch_of_plan(case: Case) -> Finding | None:
    """Single batches of a plan are not timed: that batches are uneven shows in what helps most."""
    found = case.best(lambda _: True)
    if found is None or "prefetch" not in found.trial.changes or not case.waits_for_data:
        return None
    return _advise_prefetch(case, found)


def _advise_prefetch(case: Case, found: Tried, *evidence: str) -> Finding:
    ahead = case.loader["prefetched"]
    return case.advise(
        found,
        id="small-prefetch",
        title="Prefetch is too small for how uneven the batches are",
        evidence=(
            *evidence,
            f"At most {ahead} batches are ready, {format_seconds(ahead * case.stages.step)} of training.",
        ),
        price=case.price_of_prefetch(found.trial),
    )


def heavy_collate(case: Case) -> Finding | None:
    """Making a batch of samples takes longer than reading them."""
    found, stages = case.best(is_about_workers), case.stages
    if found is None or not case.waits_for_data or stages.collate < _MOSTLY * stages.fetch:
        return None
    return case.advise(
        found,
        id="heavy-collate",
        title="Collating takes most of a batch's time",
        evidence=(
            f"collate_fn takes {format_seconds(stages.collate)} of a batch's {format_seconds(stages.fetch)}.",
            "More workers hide it; a collate_fn without a loop over samples removes it.",
        ),
        price=case.price_of_workers(found.trial),
    )


def costly_hand_over(case: Case) -> Finding | None:
    """Large batches cross from workers to the trainer, and Penstock's way is faster."""
    found = case.best(lambda trial: trial.kind == "penstock")
    if found is None or not case.waits_for_data:
        return None
    return case.advise(
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
        title=f"{percent(share)} of the tokens are padding",
        evidence=(
            f"Nothing is learned from {format_number(100 * share)} in 100 tokens, and the model computes them all.",
            "Batches of rows of similar lengths were tried; packing documents into full rows leaves no padding.",
        ),
        change="pack instead of pad: penstock.open(...).pack(length), or group batches by length",
        where=case.loader["where"],
        limit=Gain(ratio=1 / max(1e-3, 1 - share)),
        link="docs/guide/packing.md",
    )
    return finding if found is None else dataclasses.replace(finding, gain=found.estimate.gain)


def odd_batch_size(case: Case) -> Finding | None:
    """A batch size that leaves the last block of the kernels nearly empty."""
    found = case.best(lambda trial: "batch_size" in trial.changes)
    if found is None:
        return None
    size = case.options["batch_size"]
    return case.advise(
        found,
        id="odd-batch-size",
        title=f"A batch of {size} computes slower per sample than one of {found.trial.changes['batch_size']}",
        evidence=(
            f"Kernels work in blocks of 8, 16 or 32 rows, and {size} rows leave the last block nearly empty.",
            "The gain is in samples per second.",
        ),
        price="another batch size: look at the learning rate",
    )


def costly_samples(case: Case) -> Finding | None:
    """It waits for data, and nothing that could be tried helps."""
    ceiling, stages = case.recording.ceiling, case.stages
    if not case.waits_for_data or ceiling is None or not case.was_enough_tried:
        return None
    evidence: tuple[str, ...] = (
        f"A batch takes {format_seconds(stages.fetch)} to make ({format_seconds(stages.fetch_cpu)} computing), "
        f"a step {format_seconds(stages.step)}. No setting that was tried helped.",
    )
    if case.has_neighbours:
        evidence += (
            f"Other programs used {case.other_cores:.1f} of the {case.cores} cores: with these to itself, the job may "
            "gain from settings that did not help here.",
        )
    return Finding(
        id="costly-samples",
        title="Samples cost more than the machine has cores for",
        evidence=evidence,
        change="do the costly part of the transform once, in penstock.prepare",
        where=case.loader["where"],
        limit=ceiling.gain,
        link="docs/guide/ahead.md",
    )


def nothing_tried(case: Case) -> Finding | None:
    """It waits for data, and there was no time to find out what helps."""
    ceiling = case.recording.ceiling
    if not case.waits_for_data or ceiling is None or case.was_enough_tried:
        return None
    ended = not case.recording.has("done")
    evidence: tuple[str, ...] = (
        f"A batch takes {format_seconds(case.stages.fetch)} to make, a step {format_seconds(case.stages.step)}. "
        f"Changes need at least {FEWEST_ROUNDS} turns each, and {'the script' if ended else 'time'} "
        f"{'ended' if ended else 'ran out'} before that.",
    )
    if case.promising is not None:
        gain, turns = case.promising.estimate.ratio, counted(case.promising.estimate.num_rounds, "turn")
        evidence += (f"{case.promising.trial.name} looked best: × {gain:.2f} in {turns}.",)
    return Finding(
        id=NOTHING_TRIED,
        title="There was no time to find out what would help",
        evidence=evidence,
        change="let the script run longer: more epochs or steps"
        if ended
        else "give the doctor more time: a larger --seconds (120 by default)",
        limit=ceiling.gain,
    )

"""What is told of a case, and in which order.

A finding has a cause, which the recorded times show, and a change. Its gain is what trying the change gave; no
change that did not help is ever advised. To add a finding, add a function to `_worker_findings` or `_batch_findings`,
and to `FINDINGS`.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.diagnosis._batch_findings import (
    cold_reads,
    costly_hand_over,
    costly_samples,
    heavy_collate,
    nothing_tried,
    odd_batch_size,
    padded_batches,
    slow_samples,
    small_prefetch,
)
from penstock.diagnosis._case import Case
from penstock.diagnosis._worker_findings import (
    few_workers,
    growing_workers,
    no_workers,
    threads_share_one_lock,
    too_many_workers,
    torch_threads,
    workers_restart,
)
from penstock.report import Finding

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
    fallback = costly_samples(case) or nothing_tried(case)
    if fallback is not None and all(each.id in _NOT_ABOUT_LOADING for each in told.values()):
        told[fallback.change] = fallback
    return sorted(told.values(), key=lambda each: -(each.gain.ratio if each.gain is not None else 0.0))

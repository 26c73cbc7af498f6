"""How a change that helped becomes a finding: its gain, its price, and the line to write."""

from __future__ import annotations

from penstock.diagnosis._case import Case, Tried
from penstock.diagnosis._experiment import Trial
from penstock.report import Finding, format_bytes


def advise(
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
    """A finding whose change was tried."""
    gain, where = found.estimate.gain, case.loader["where"]
    return Finding(id=id, title=title, evidence=evidence, change=change, where=where, price=price, gain=gain, link=link)


def written_call(trial: Trial) -> str:
    """The line to write."""
    written = ", ".join(f"{name}={value!r}" for name, value in trial.changes.items())
    return f"DataLoader(..., {written})"


def is_smoothing(trial: Trial) -> bool:
    """Whether a trial evens out batches of uneven cost."""
    return any(name in trial.changes for name in ("prefetch_factor", "prefetch", "in_order", "num_workers"))


def is_about_workers(trial: Trial) -> bool:
    """Whether a trial has another number of workers."""
    return "num_workers" in trial.changes and trial.kind == "options"


def price_of_prefetch(case: Case, trial: Trial) -> str:
    """What more batches that are ready cost."""
    workers = trial.changes.get("num_workers", case.options["num_workers"])
    depth = trial.changes.get("prefetch_factor", case.options["prefetch_factor"] or 2)
    more = max(0, workers * depth - case.loader["prefetched"]) * case.stages.bytes
    return f"up to {format_bytes(more)} of memory for batches" if more else "batches come in another order"


def price_of_workers(case: Case, trial: Trial) -> str:
    """What more workers cost."""
    more = trial.changes["num_workers"] - case.options["num_workers"]
    return f"memory of {more} more process{'es' if more != 1 else ''}"


def percent(share: float) -> str:
    """A share as people write it."""
    return f"{100 * share:.0f} %"

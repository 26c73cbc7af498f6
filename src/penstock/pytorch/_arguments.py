"""Settings of a loader."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from penstock.plan import Plan
from penstock.workers import default_workers

Workers = Literal["auto", "inline", "thread", "process"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSettings:
    """How a plan is run; none of it changes a batch."""

    workers: Workers = "auto"
    """"auto" takes threads for Penstock's own gathers and functions marked pure, processes for other Python code."""
    num_workers: int | Literal["auto"] = "auto"
    """More workers produce more and leave less of the processors to the training thread."""
    prefetch: int | None = None
    """Batches computed ahead: hides uneven workers, costs memory. None: two per worker, more of small ones."""
    in_order: bool = True
    """Hand batches over in order. Without it a slow one holds up nothing, and there is no state to save."""
    micro_batch: int | None = None
    """Hand a step's rows out in pieces of this many, for accumulating gradients."""
    epochs: int | None = 1
    """Epochs that one `for` loop runs through; None never stops."""
    drop_consumed: bool = False
    """Let data that was read leave the page cache: for data far larger than memory, which nobody else reads."""
    start_method: Literal["forkserver", "spawn", "fork"] = "forkserver"
    """How worker processes start. "fork" takes lambdas along, and every lock and thread of the trainer too."""

    def __post_init__(self) -> None:
        if self.workers not in ("auto", "inline", "thread", "process"):
            raise ValueError(f"workers={self.workers!r}; the kinds are 'auto', 'inline', 'thread' and 'process'.")
        if self.num_workers != "auto" and (type(self.num_workers) is not int or self.num_workers < 0):
            raise ValueError(f"num_workers={self.num_workers!r}; give a number from 0 on, or 'auto'.")
        if self.start_method not in ("forkserver", "spawn", "fork"):
            raise ValueError(f"start_method={self.start_method!r}; it is 'forkserver', 'spawn' or 'fork'.")
        for name in ("prefetch", "micro_batch", "epochs"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name}={value!r}; give a number from 1 on.")

    def with_prefetch_factor(self, plan: Plan, prefetch_factor: int | None) -> LoaderSettings:
        """The same with torch's number of batches ahead per worker, unless their number in all is given."""
        _, num_workers = self.resolve(plan)
        if prefetch_factor is None or self.prefetch is not None or not num_workers:
            return self
        return dataclasses.replace(self, prefetch=prefetch_factor * num_workers)

    def resolve(self, plan: Plan) -> tuple[Literal["inline", "thread", "process"], int]:
        """(kind, number) of the workers for a plan."""
        kind = self.workers
        if kind == "auto":
            kind = "process" if plan.runs_python else "thread"
        if self.num_workers == 0:
            kind = "inline"
        if kind == "inline":
            return "inline", 0
        if kind == "thread" and plan.needs_isolation:
            raise ValueError(
                "A mapped function takes only the row, so it may use global generators, which threads share. "
                "Use workers='process', give it (row, rng), or mark it with @penstock.pure."
            )
        return kind, default_workers(kind) if self.num_workers == "auto" else self.num_workers


def check_torch_arguments(num_workers: Any, workers: Any, *others: Any) -> None:
    """Refuse arguments of plans for a torch dataset."""
    if num_workers == "auto":
        raise ValueError("num_workers='auto' is for plans; with a torch dataset it decides on random numbers.")
    if workers not in ("auto", "process"):
        raise ValueError(f"workers={workers!r} is for plans; samples of a torch dataset are computed in processes.")
    for name, value in zip(_PLAN_ONLY, others, strict=True):
        if value != _PLAN_ONLY[name][0]:
            raise ValueError(f"{name}={value!r} is for plans; with a torch dataset use {_PLAN_ONLY[name][1]}.")


_PLAN_ONLY: dict[str, tuple[Any, str]] = {
    "prefetch": (None, "prefetch_factor, per worker"),
    "rank": (None, "sampler=DistributedSampler(...)"),
    "world_size": (None, "sampler=DistributedSampler(...)"),
    "micro_batch": (None, "batch_size"),
    "epochs": (1, "a loop around the loop"),
    "start_method": ("forkserver", "multiprocessing_context"),
    "drop_consumed": (False, "a dataset that drops what it has read"),
}

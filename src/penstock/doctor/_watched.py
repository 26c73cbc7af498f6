"""A loader that a script made: where, how, and what was seen of it so far."""

from __future__ import annotations

import os
import statistics
import sys
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

from penstock.doctor._sources import IndexTap, Replay, is_ours, is_plans, num_workers_of

_LIBRARIES = ("torch", "penstock", "lightning", "pytorch_lightning", "accelerate", "transformers", "torchdata")
_OPTIONS = ("batch_size", "num_workers", "prefetch_factor", "persistent_workers", "pin_memory", "in_order", "timeout")
_KEPT_PERIODS = 64
_MOST_REMEMBERED = 512
_SKIPPED_STEPS = 2
"""The first ones compile kernels and fill caches."""


class Watched:
    """What the doctor knows about one loader."""

    def __init__(self, loader: Any, number: int, where: str) -> None:
        self._find = weakref.ref(loader)
        self.number, self.where = number, where
        self.replay = Replay()
        self.remembered: deque[Any] = deque(maxlen=_MOST_REMEMBERED)
        """The latest indices that its iterators drew."""
        self.length: int | None = None
        self.num_steps = self.num_epochs = 0
        self.steps_of_last_epoch: int | None = None
        self.waited = 0
        self.trains = False
        """Whether gradients were on when it was asked for a batch."""
        self.first_at: int | None = None
        self.left_at: int | None = None
        self.periods: list[float] = []
        self.was_described = False
        self._likeness = _likeness(loader)

    def resembles(self, loader: Any) -> bool:
        """Whether a loader made later, on the same line, is the same one made again."""
        return _likeness(loader) == self._likeness

    def continue_with(self, loader: Any) -> None:
        """It was made again."""
        self._find = weakref.ref(loader)

    @property
    def loader(self) -> Any:
        """The loader; it lives while someone iterates over it."""
        return self._find()

    @property
    def prefetched(self) -> int:
        """Batches that its workers may have ready."""
        loader = self.loader
        if is_plans(loader):
            return int(loader.prefetch or 2 * max(1, num_workers_of(loader)))
        return int(loader.num_workers * (loader.prefetch_factor or 0))

    @property
    def step_seconds(self) -> float:
        """Median time from batch to batch."""
        return statistics.median(self.periods) if self.periods else 0.0

    def begin_epoch(self) -> None:
        """A loop over it begins."""
        try:
            self.length = len(self.loader)
        except Exception:  # noqa: BLE001 - iterable datasets need not have a length, and users' own may fail
            self.length = None
        self.left_at = None

    def count_step(self, asked_at: int, now: int) -> None:
        """A batch was handed over."""
        if self.first_at is None:
            self.first_at = now
        if self.left_at is not None and self.num_steps > _SKIPPED_STEPS:
            self.periods = [*self.periods[-_KEPT_PERIODS:], (now - self.left_at) / 1e9]
        self.num_steps += 1
        self.waited += now - asked_at
        self.left_at = now

    def tap(self, iterator: Iterator[Any]) -> IndexTap | None:
        """Listen to the indices that torch's iterator draws; others do not show them."""
        if getattr(self.loader, "_dataset_kind", 1) == 1 or getattr(iterator, "_sampler_iter", None) is None:
            return None
        tap = IndexTap(iterator._sampler_iter, self.remembered)  # type: ignore[attr-defined]
        iterator._sampler_iter = tap  # type: ignore[attr-defined]
        return tap

    def own_statistics(self) -> dict[str, float] | None:
        """What a plan's loader says about itself, per batch; torch's are timed from inside."""
        if not is_plans(self.loader):
            return None
        totals = self.loader.stats()
        each = 1 / max(1, totals.num_batches)
        return {
            "fetch": totals.produce_seconds * each,
            "fetch_cpu": totals.worker_cpu_seconds * each,
            "faults": totals.page_faults * each,
        }

    def describe(self) -> dict[str, Any]:
        """What the report says about it."""
        loader, dataset = self.loader, self.loader.dataset
        context = getattr(loader, "multiprocessing_context", None)
        return {
            "loader": self.number,
            "where": self.where,
            "kind": "penstock" if is_ours(loader) else "torch",
            "is_plan": is_plans(loader),
            "workers": getattr(loader, "kind", "process" if loader.num_workers else "inline"),
            "is_iterable": loader._dataset_kind == 1,
            "dataset": f"{type(dataset).__module__}.{type(dataset).__qualname__}",
            "context": context.get_start_method() if context is not None else None,
            "length": self.length,
            "prefetched": self.prefetched,
            "options": {name: getattr(loader, name, None) for name in _OPTIONS}
            | {"num_workers": num_workers_of(loader)},
        }


def _likeness(loader: Any) -> tuple[Any, ...]:
    try:
        length = len(loader.dataset)
    except Exception:  # noqa: BLE001 - datasets need not have a length, and users' own may fail
        length = None
    return type(loader), type(loader.dataset), length, *(getattr(loader, name, None) for name in _OPTIONS)


def place_of_caller() -> str:
    """`train.py:24`: the innermost line on the stack that is the user's, not a library's."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in _LIBRARIES:
        frame = frame.f_back
    if frame is None:
        return ""
    path = frame.f_code.co_filename
    try:
        short = os.path.relpath(path) if os.path.exists(path) else path
    except OSError:  # the current folder is gone
        short = path
    return f"{path if short.startswith('..') else short}:{frame.f_lineno}"

"""The loaders that a script made, and what it iterates over in place of their own iterators.

ScriptLoader   where and how it was made, and what was seen of it so far
ScriptLoop     one epoch; each batch is asked for from the examination
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from penstock.doctor._experiment import AS_IS, REPLAY, Trial
from penstock.doctor._recording import Recorder
from penstock.doctor._supplies import (
    BatchSupply,
    IndexTap,
    IteratorSupply,
    Replay,
    bytes_of,
    can_regroup,
    is_ours,
    loads_plan,
    num_workers_of,
    padding_share,
    rows_of,
)
from penstock.errors import PenstockError

_LIBRARIES = ("torch", "penstock", "lightning", "pytorch_lightning", "accelerate", "transformers", "torchdata")
_OPTIONS = ("batch_size", "num_workers", "prefetch_factor", "persistent_workers", "pin_memory", "in_order", "timeout")
_LOOK_STEPS, _LOOK_SECONDS = 12, 1.0
_FEWEST_LOOK_STEPS, _LONGEST_LOOK_SECONDS = 5, 10.0
_KEPT_PERIODS = 64
_MOST_REMEMBERED = 512
_SKIPPED_STEPS = 2
_DEALT_STEPS = 4
"""The first ones fill caches."""


class ScriptLoader:
    """What the doctor knows about one loader of a script."""

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
        self._signature = _signature(loader)

    def continues_with(self, loader: Any) -> bool:
        """Whether one made later, on the same line, is this one made again, as some scripts do for each epoch."""
        is_again = self.instance is None and _signature(loader) == self._signature
        if is_again:
            self._find = weakref.ref(loader)
        return is_again

    @property
    def instance(self) -> Any:
        """The script's object; it lives while someone iterates over it."""
        return self._find()

    @property
    def prefetched(self) -> int:
        """Batches that its workers may have ready."""
        loader = self.instance
        if loads_plan(loader):
            return int(loader.prefetch or 2 * max(1, num_workers_of(loader)))
        return int(loader.num_workers * (loader.prefetch_factor or 0))

    @property
    def step_seconds(self) -> float:
        """Median time from batch to batch."""
        return statistics.median(self.periods) if self.periods else 0.0

    def begin_epoch(self) -> None:
        """A loop over it begins."""
        self.length, self.left_at = _length_of(self.instance), None

    def count_step(self, asked_at: int, now: int) -> None:
        """A batch was handed over."""
        torch = sys.modules.get("torch")
        self.trains = self.trains or (torch is not None and torch.is_grad_enabled())
        if self.first_at is None:
            self.first_at = now
        if self.left_at is not None and self.num_steps > _SKIPPED_STEPS:
            self.periods = [*self.periods[-_KEPT_PERIODS:], (now - self.left_at) / 1e9]
        self.num_steps += 1
        self.waited += now - asked_at
        self.left_at = now

    def tap(self, iterator: Iterator[Any]) -> IndexTap | None:
        """Listen to the indices that torch's iterator draws; others do not show them."""
        if getattr(self.instance, "_dataset_kind", 1) == 1 or getattr(iterator, "_sampler_iter", None) is None:
            return None
        tap = IndexTap(iterator._sampler_iter, self.remembered)  # type: ignore[attr-defined]
        iterator._sampler_iter = tap  # type: ignore[attr-defined]
        return tap

    def own_statistics(self) -> dict[str, float] | None:
        """What a plan's loader says about itself, per batch; torch's are timed from inside."""
        if not loads_plan(self.instance):
            return None
        totals = self.instance.stats()
        each = 1 / max(1, totals.num_batches)
        return {
            "fetch": totals.produce_seconds * each,
            "fetch_cpu": totals.worker_cpu_seconds * each,
            "faults": totals.page_faults * each,
            "store_wait": totals.fetch_wait_seconds * each,
            "store_rate": totals.fetch_bytes_per_second,
            "store_latency": totals.fetch_request_seconds,
        }

    def imbalance(self) -> float | None:
        """How much faster the dearest rank of the first steps is when a plan's rows are dealt by attention."""
        if not loads_plan(self.instance):
            return None
        run = self.instance._run
        try:
            ranks = run.plan.global_size // run.rows_per_rank
            found = run.plan.imbalance(ranks, balance="attention", steps=range(_DEALT_STEPS))
        except (PenstockError, ValueError, IndexError):  # rows without lengths, or few of them
            return None
        return None if run.plan.stages[-1].balance else 1 + found.gain

    def describe(self) -> dict[str, Any]:
        """What the report says about it."""
        loader, dataset = self.instance, self.instance.dataset
        context = getattr(loader, "multiprocessing_context", None)
        return {
            "loader": self.number,
            "where": self.where,
            "kind": "penstock" if is_ours(loader) else "torch",
            "is_plan": loads_plan(loader),
            "workers": getattr(loader, "kind", "process" if loader.num_workers else "inline"),
            "is_iterable": loader._dataset_kind == 1,
            "dataset": f"{type(dataset).__module__}.{type(dataset).__qualname__}",
            "context": context.get_start_method() if context is not None else None,
            "length": self.length,
            "prefetched": self.prefetched,
            "options": {name: getattr(loader, name, None) for name in _OPTIONS}
            | {"num_workers": num_workers_of(loader)},
        }


class ScriptLoop:
    """Batches of one epoch, each from the supply of the trial that runs; otherwise the iterator that it replaces.

    An epoch has as many batches as without the doctor, though not all of them the same ones. A trial that fails or
    runs out never ends the script's epoch: it continues with the script's own loader, then with saved batches.
    """

    def __init__(
        self,
        next_batch: Callable[[ScriptLoop], Any],
        loader: ScriptLoader,
        make_own: Callable[[], Iterator[Any]],
    ) -> None:
        self._next_batch, self.loader, self._make_own = next_batch, loader, make_own
        self.trial = AS_IS
        """What the next batch comes from; set by the examination alone."""
        self.supplies: dict[int, BatchSupply] = {REPLAY.number: loader.replay}
        """Those of trials that do not use the script's own loader."""
        self.num_steps = self.rows = self.waited = 0
        self._was_experimented_on = False
        self._own: IteratorSupply | None = None
        self.tap: IndexTap | None = None

    def own(self) -> IteratorSupply:
        """The script's own iterator, made when it is needed."""
        if self._own is None:
            iterator = self._make_own()
            self.tap = self.loader.tap(iterator)
            self._own = IteratorSupply(iterator, self.loader.instance)
        return self._own

    def supply(self) -> BatchSupply:
        """Where the next batch comes from."""
        return self.supplies.get(self.trial.number) or self.own()

    def take_own(self) -> Any:
        """A batch of the script's own loader; if trials took some of its samples, of the saved ones at the end."""
        try:
            return self.own().take()
        except StopIteration:
            if self._was_experimented_on and self.loader.length is not None:
                return self.loader.replay.take()
            raise

    @property
    def is_over(self) -> bool:
        """Whether it has given as many batches as without the doctor."""
        length = self.loader.length
        return self._was_experimented_on and length is not None and self.num_steps >= length

    def use(self, trial: Trial) -> None:
        """Serve a trial's batches from now on."""
        self.trial = trial
        self._was_experimented_on = self._was_experimented_on or trial is not AS_IS

    def close(self) -> None:
        """End the workers that the doctor started for this epoch."""
        for supply in self.supplies.values():
            supply.close()
        self.supplies.clear()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._next_batch(self)

    def __len__(self) -> int:
        return len(self.own().iterator)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_make_own" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.own().iterator, name)

    def __del__(self) -> None:
        if "supplies" in self.__dict__:
            self.close()


class Look:
    """Some steps of the baseline, of all loops: which one trains, and how fast it is."""

    def __init__(self, log: Recorder, rank: int) -> None:
        self._log, self._rank = log, rank
        self._loaders: dict[int, ScriptLoader] = {}
        self._clocks = time.perf_counter(), time.process_time()

    def begin_epoch(self, loader: ScriptLoader) -> None:
        """A loop over a loader begins."""
        loader.begin_epoch()
        if loader.number not in self._loaders:
            self._loaders[loader.number] = loader
            self._log.note("loader", **loader.describe(), rank=self._rank)

    def add(self, loader: ScriptLoader, batch: Any, now: int) -> ScriptLoader | None:
        """A batch was handed over. Returns the loader to examine, once enough was seen.

        It is the one that is waited for most, among those that go together, as in `zip(a, b)`.
        """
        if not loader.replay.is_full:
            loader.replay.keep(batch)
            self._log.note(
                "batch",
                loader=loader.number,
                rows=rows_of(batch),
                bytes=bytes_of(batch),
                padding=padding_share(batch),
                can_regroup=can_regroup(batch),
            )
        if not _has_seen_enough(loader, now):
            return None
        together = [each for each in self._loaders.values() if go_together(each, loader)]
        return max(together, key=lambda each: each.waited)

    def describe_examined(self, loader: ScriptLoader, *, whole_epochs: bool) -> None:
        """Record what the doctor experiments on, and how the training process computes."""
        torch = sys.modules["torch"]
        wall, cpu = time.perf_counter() - self._clocks[0], time.process_time() - self._clocks[1]
        accelerator = getattr(torch, "accelerator", None)
        self._log.note(
            "primary",
            loader=loader.number,
            rank=self._rank,
            step_seconds=loader.step_seconds,
            whole_epochs=whole_epochs,
            told=loader.own_statistics(),
            imbalance=loader.imbalance(),
            num_threads=torch.get_num_threads(),
            cpu_share=cpu / max(wall, 1e-9),
            accelerator=bool(accelerator is not None and accelerator.is_available()),
        )


def go_together(one: ScriptLoader, other: ScriptLoader) -> bool:
    """Whether two loops advance in step, as in `zip(a, b)`."""
    return abs(one.num_steps - other.num_steps) <= 1


def _has_seen_enough(loader: ScriptLoader, now: int) -> bool:
    assert loader.first_at is not None
    seconds, steps = (now - loader.first_at) / 1e9, loader.num_steps
    patience = 1 if loader.trains else 8
    enough = steps >= patience * _LOOK_STEPS and seconds >= patience * _LOOK_SECONDS
    return enough or (steps >= patience * _FEWEST_LOOK_STEPS and seconds >= patience * _LONGEST_LOOK_SECONDS)


def _signature(loader: Any) -> tuple[Any, ...]:
    options = (getattr(loader, name, None) for name in _OPTIONS)
    return type(loader), type(loader.dataset), _length_of(loader.dataset), *options


def _length_of(sized: Any) -> int | None:
    try:
        return len(sized)
    except Exception:  # noqa: BLE001 - datasets need not have a length, and users' own may fail
        return None


def line_of_caller() -> str:
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

"""What a script iterates over in place of its loader's own iterator.

Each batch comes from the source whose turn it is; a keeper follows the loop, and decides whose turn is next. A trial
that fails or runs out never ends the script's epoch: the rest comes from the script's own loader, and what that lacks
by then from batches that were kept.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from penstock.doctor._experiment import AS_IS, Trial
from penstock.doctor._sources import IndexTap, IteratorSource, Source
from penstock.doctor._watched import Watched


class LoopKeeper(Protocol):
    """Follows a loop, and decides what it serves."""

    def started(self, watched: Watched, begin: int, end: int) -> None:
        """A loader's own iterator was made."""
        ...

    def before(self, loop: TrainingLoop) -> None:
        """A script asks for a batch."""
        ...

    def after(self, loop: TrainingLoop, batch: Any, begin: int, end: int) -> None:
        """A batch is about to be handed over."""
        ...

    def ended(self, loop: TrainingLoop) -> None:
        """A loop came to the end of its epoch."""
        ...

    def take(self, loop: TrainingLoop) -> Any:
        """A batch of the trial that has its turn."""
        ...

    def ran_out(self, loop: TrainingLoop) -> None:
        """A trial's source has no more batches in this epoch."""
        ...

    def failed(self, loop: TrainingLoop, error: Exception) -> None:
        """A trial does not work here."""
        ...


class TrainingLoop:
    """Batches of one epoch, from whichever source has its turn; in everything else, the iterator that it replaces.

    An epoch has as many batches as without the doctor, though not all of them the same ones.
    """

    def __init__(self, keeper: LoopKeeper, watched: Watched, make_own: Callable[[], Iterator[Any]]) -> None:
        self._keeper, self.watched, self._make_own = keeper, watched, make_own
        self.trial = AS_IS
        self.sources: dict[int, Source] = {}
        self.num_handed_over = 0
        self.rows = 0
        self.waited = 0
        self.was_experimented_on = False
        self._own: IteratorSource | None = None
        self.tap: IndexTap | None = None

    def own(self) -> IteratorSource:
        """The script's own iterator, made when it is needed."""
        if self._own is None:
            begin = time.perf_counter_ns()
            iterator = self._make_own()
            self._keeper.started(self.watched, begin, time.perf_counter_ns())
            self.tap = self.watched.tap(iterator)
            self._own = IteratorSource(iterator, self.watched.loader)
        return self._own

    def num_ready(self) -> float:
        """Batches that the trial has ready; NaN for a replay, and where that is unknown."""
        if self.trial.kind == "replay":
            return math.nan
        return (self.sources.get(self.trial.number) or self.own()).num_ready()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self.own().iterator)  # type: ignore[arg-type]

    def __next__(self) -> Any:
        self._keeper.before(self)
        begin = time.perf_counter_ns()
        try:
            batch = self._take()
        except StopIteration:
            self._keeper.ended(self)
            raise
        self._keeper.after(self, batch, begin, time.perf_counter_ns())
        return batch

    def _take(self) -> Any:
        length = self.watched.length
        if self.was_experimented_on and length is not None and self.num_handed_over >= length:
            raise StopIteration
        if not self.trial.uses_own_loader:
            try:
                return self._keeper.take(self)
            except StopIteration:
                self._keeper.ran_out(self)
            except Exception as error:  # noqa: BLE001 - a remedy that does not work is not the script's error
                self._keeper.failed(self, error)
        try:
            return self.own().take()
        except StopIteration:
            if self.was_experimented_on and length is not None and self.num_handed_over < length:
                return self.watched.replay.take()
            raise

    def use(self, trial: Trial) -> None:
        """Serve a trial's batches from now on."""
        self.trial = trial
        self.was_experimented_on = self.was_experimented_on or trial.number != AS_IS.number

    def close(self) -> None:
        """End the workers that the doctor started for this epoch."""
        for source in self.sources.values():
            source.close()
        self.sources.clear()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_make_own" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.own().iterator, name)

    def __del__(self) -> None:
        if "_keeper" in self.__dict__:
            self.close()

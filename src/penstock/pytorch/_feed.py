"""What every feed has in common: batches begun before they are asked for, and handed over in order.

    source (pipeline, torch batches) -> PinningFeed -> DeviceFeed -> training loop

A feed lies between what computes batches and the training loop: it begins a batch or two early and hands over the
oldest. All of it happens in the training thread, inside its `next()`, so a source needs no lock. It is asked ahead
only for what it says is ready: a slow source never delays a batch that is there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

import torch

Begun = TypeVar("Begun")


class BatchSource(Protocol):
    """Where batches come from, each with a receipt: what the loop needs to count it as handed over."""

    def next(self) -> tuple[Any, Any] | None:
        """(receipt, batch), or None when there are no more."""
        ...

    def is_ready(self) -> bool:
        """Whether `next` would return, or raise, without waiting."""
        ...


class Feed(BatchSource, Protocol):
    """A source that takes from another one, ahead of the training loop."""

    def close(self) -> None:
        """Let go of batches not handed over."""
        ...


def take(source: BatchSource, profiled_as: str) -> tuple[Any, Any] | None:
    """The next batch; while torch's profiler runs, as a range of this name. Entering one costs 20 us."""
    if not torch._C._autograd._profiler_enabled():
        return source.next()
    with torch.profiler.record_function(profiled_as):
        return source.next()


class Lookahead(Generic[Begun]):
    """Keeps up to `num_begun` batches of a source begun; `begin` must not refer to the object that owns this one.

    An error of the source is kept until the batches before it were handed over, and raised once; after it the
    source is asked again.
    """

    def __init__(self, source: BatchSource, begin: Callable[[Any], Begun], *, num_begun: int) -> None:
        self._source = source
        self._begin = begin
        self._num_begun = num_begun
        self._begun: deque[tuple[Any, Begun]] = deque()
        self._error: Exception | None = None

    def first(self) -> tuple[Any, Begun] | None:
        """(receipt, begun) of the oldest batch, which stays until `drop_first`, so that a Ctrl-C loses none."""
        self._fill()
        if self._begun:
            return self._begun[0]
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback leads here
        return None

    def drop_first(self) -> None:
        """Forget the oldest batch: it was handed over."""
        self._begun.popleft()

    def is_ready(self) -> bool:
        """Whether `first` would not wait for the source."""
        return bool(self._begun) or self._error is not None or self._source.is_ready()

    def clear(self) -> Iterator[Begun]:
        """Forget everything, and yield what it was."""
        self._error = None
        while self._begun:
            yield self._begun.popleft()[1]

    def _fill(self) -> None:
        if self._error is not None:
            return
        try:
            while len(self._begun) < self._num_begun and (not self._begun or self._source.is_ready()):
                found = self._source.next()
                if found is None:
                    return
                self._begun.append((found[0], self._begin(found[1])))
                del found
        except Exception as error:  # noqa: BLE001 - raised when its turn comes
            self._error = error

"""Batches begun before they are asked for, and handed over in order.

What lies between a loader and the training loop (pinning, the copy to the device) has the same shape: begin a
batch or two early, hand over the oldest. All of it happens in the caller's thread, inside its `next()`, so a
source needs no lock. It is asked ahead only for what it says is ready: a slow source delays nothing that is there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

Begun = TypeVar("Begun")


class Source(Protocol):
    """Where batches come from, each with a token that says which one it is."""

    def next(self) -> tuple[Any, Any] | None:
        """(token, batch), or None when there are no more."""
        ...

    def is_ready(self) -> bool:
        """Whether `next` would return, or raise, without waiting."""
        ...


class Lookahead(Generic[Begun]):
    """Keeps up to `num_begun` batches of a source begun; `begin` must not refer to the object that owns this one.

    An error of the source is kept until the batches before it were handed over, and raised once; after it the
    source is asked again.
    """

    def __init__(self, source: Source, begin: Callable[[Any], Begun], *, num_begun: int) -> None:
        self._source = source
        self._begin = begin
        self._num_begun = num_begun
        self._begun: deque[tuple[Any, Begun]] = deque()
        self._error: Exception | None = None

    def first(self) -> tuple[Any, Begun] | None:
        """(token, begun) of the oldest batch, which stays until `drop_first`, so that a Ctrl-C loses none."""
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
        """Forget everything, and say what it was."""
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

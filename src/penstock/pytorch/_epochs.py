"""The epoch that each worker of a dataset begins next, known to all processes that share it.

Without this, an epoch set in the training process would not reach workers that live on, and one counted in
workers would be lost with them.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from penstock.pytorch._shared_pages import SharedPages

_MOST_WORKERS = 2048
_USER, _HAS_SPOKEN, _FIRST_WORKER = range(3)
_FIRST_PASS = _FIRST_WORKER + _MOST_WORKERS
_NUM_BYTES = 8 * (_FIRST_PASS + _MOST_WORKERS)


class SharedEpochs:
    """For each worker the epoch that is next and how many it has begun, and who did so last."""

    def __init__(self, pages: SharedPages | None = None) -> None:
        self._pages = SharedPages(_NUM_BYTES) if pages is None else pages
        self._numbers = self._pages.view.cast("q")

    def next_epoch(self, worker: int) -> int:
        """The epoch that this worker begins next."""
        return self._numbers[_FIRST_WORKER + worker]

    def num_begun(self, worker: int) -> int:
        """How many epochs this worker has begun."""
        return self._numbers[_FIRST_PASS + worker]

    def begin(self, worker: int, epoch: int) -> None:
        """This worker, in this process, begins an epoch; the one after it is next."""
        self._numbers[_FIRST_WORKER + worker] = epoch + 1
        self._numbers[_USER] = os.getpid()
        self._numbers[_FIRST_PASS + worker] += 1

    def set_next(self, epoch: int, worker: int | None = None) -> None:
        """This worker, or every one, begins this epoch next."""
        workers = range(_MOST_WORKERS) if worker is None else (worker,)
        for each in workers:
            self._numbers[_FIRST_WORKER + each] = epoch

    @property
    def is_used_elsewhere(self) -> bool:
        """Whether the last process that began an epoch is another one."""
        return self._numbers[_USER] not in (0, os.getpid())

    def speaks_first(self) -> bool:
        """True once, in all processes together."""
        has_spoken, self._numbers[_HAS_SPOKEN] = self._numbers[_HAS_SPOKEN], 1
        return not has_spoken

    def __reduce__(self) -> tuple[Callable[..., SharedEpochs], tuple[SharedPages, int]]:
        return _restore, (self._pages, self.next_epoch(0))


def _restore(pages: SharedPages, epoch: int) -> SharedEpochs:
    """The same numbers, or in a process that does not share them a copy."""
    epochs = SharedEpochs(pages)
    if pages.is_new:
        epochs.set_next(epoch)
    return epochs

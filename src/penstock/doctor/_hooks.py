"""Puts the doctor into torch's and our DataLoader, in a process of a script that knows nothing about it.

Called by `_injected/sitecustomize.py` when the modules have been imported. The script still sees the same classes, with
the same signatures.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from penstock.doctor._conductor import Conductor
from penstock.doctor._probes import PLAIN_ITERS, iterate_plainly, time_fetchers, time_unpacking, time_workers
from penstock.doctor._recorder import recorder
from penstock.doctor._trials import is_rebuilding
from penstock.doctor._watched import Watched, place_of_caller

_watched: weakref.WeakKeyDictionary[Any, Watched] = weakref.WeakKeyDictionary()
_by_place: dict[str, Watched] = {}
_numbers = itertools.count(1)


def watch_torch(dataloader: ModuleType) -> None:
    """Watch every `torch.utils.data.DataLoader`, and all that inherit from it. `dataloader` is its module."""
    time_fetchers(dataloader._utils.fetch)
    time_workers(dataloader._utils.worker)
    time_unpacking()
    loader_class = dataloader.DataLoader
    loader_class.__init__ = _remembering(loader_class.__init__)
    _watch_iter(loader_class)
    recorder().note("process", argv=sys.argv, python=sys.version.split()[0])


def watch_penstock(dataloader: ModuleType) -> None:
    """Watch every `penstock.DataLoader`, which has an `__iter__` of its own."""
    _watch_iter(dataloader.DataLoader)


def watch_optimizers(optimizer: ModuleType) -> None:
    """Notice training that does not get its batches from a loader. `optimizer` is torch's module."""
    optimizer.register_optimizer_step_post_hook(_after_optimizer_step)


def _after_optimizer_step(*_: Any) -> None:
    if recorder().worker < 0 and recorder().is_wanted and (conductor := _conductor()) is not None:
        conductor.optimizer_stepped()


@functools.cache
def _conductor() -> Conductor | None:
    """The conductor of this process; None, and the script is left alone, if the doctor has gone or its disk is full."""
    try:
        return Conductor(recorder())
    except OSError:
        return None


os.register_at_fork(after_in_child=_conductor.cache_clear)


def _remembering(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, *arguments: Any, **options: Any) -> None:
        is_new, place = self not in _watched, place_of_caller()
        original(self, *arguments, **options)
        if is_new and not is_rebuilding():
            _watched[self] = _same_as_before(self, place) or Watched(self, next(_numbers), place)
            _by_place[place] = _watched[self]

    return init


def _same_as_before(loader: Any, place: str) -> Watched | None:
    """The known loader that a new one continues, since some scripts make theirs again for each epoch; or None."""
    before = _by_place.get(place)
    if before is None or before.loader is not None or not before.resembles(loader):
        return None
    before.continue_with(loader)
    return before


def _watch_iter(loader_class: Any) -> None:
    plain: Callable[[Any], Iterator[Any]] = loader_class.__iter__
    PLAIN_ITERS[loader_class] = plain

    @functools.wraps(plain)
    def iterate(self: Any) -> Iterator[Any]:
        watched = _watched.get(self)
        if watched is None or recorder().worker >= 0 or not recorder().is_wanted:
            return plain(self)
        conductor, number = _conductor(), watched.number
        if conductor is None:
            return plain(self)
        return conductor.start_loop(watched, lambda: iterate_plainly(self, number, 0))

    loader_class.__iter__ = iterate

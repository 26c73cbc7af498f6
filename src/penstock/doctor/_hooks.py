"""Puts the doctor into torch's and our DataLoader, in a process of a script that knows nothing about it.

Called by `_injected/sitecustomize.py` when the modules have been imported. The script still sees the same classes, with
the same signatures.
"""

import functools
import itertools
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from penstock.doctor._examination import Examination
from penstock.doctor._loaders import ScriptLoader, line_of_caller
from penstock.doctor._probes import PLAIN_ITERS, iterate_plainly, time_fetchers, time_unpacking, time_workers
from penstock.doctor._recording import recorder
from penstock.doctor._trial_loaders import is_rebuilding

_loaders: weakref.WeakKeyDictionary[Any, ScriptLoader] = weakref.WeakKeyDictionary()
_by_line: dict[str, ScriptLoader] = {}
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
    if recorder().worker < 0 and recorder().is_wanted and (examination := _examination()) is not None:
        examination.optimizer_stepped()


@functools.cache
def _examination() -> Examination | None:
    """The examination of this process; None, so that the script is left alone, without the doctor or room on disk."""
    try:
        return Examination(recorder())
    except OSError:
        return None


os.register_at_fork(after_in_child=_examination.cache_clear)


def _remembering(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, *arguments: Any, **options: Any) -> None:
        is_new, line = self not in _loaders, line_of_caller()
        original(self, *arguments, **options)
        if is_new and not is_rebuilding():
            if line not in _by_line or not _by_line[line].continues_with(self):
                _by_line[line] = ScriptLoader(self, next(_numbers), line)
            _loaders[self] = _by_line[line]

    return init


def _watch_iter(loader_class: Any) -> None:
    plain: Callable[[Any], Iterator[Any]] = loader_class.__iter__
    PLAIN_ITERS[loader_class] = plain

    @functools.wraps(plain)
    def iterate(self: Any) -> Iterator[Any]:
        loader = _loaders.get(self)
        if loader is None or recorder().worker >= 0 or not recorder().is_wanted:
            return plain(self)
        examination, number = _examination(), loader.number
        if examination is None:
            return plain(self)
        return examination.start_loop(loader, lambda: iterate_plainly(self, number, 0))

    loader_class.__iter__ = iterate

"""Compiled loops, kept between runs where only this user can have put them.

Compiling all of them takes half a minute, so numba keeps what it made. What it finds there it runs, so a place counts
only if whoever can write to it could change the module as well, or is this user or root:

    NUMBA_CACHE_DIR -> beside the module -> the user's cache folder -> a folder of this user's in the temporary one

In many containers none of the first three is writable, or HOME is missing or shared. Without any place, or on a full
disk, each process compiles for itself.

May import: nothing. Imported by: `order`, `packing`, `rows`, `shards`, `transforms`. Holds state: files of compiled
loops, in the first of these folders.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numba
from numba.core.caching import (
    CompileResultCacheImpl,
    FunctionCache,
    InTreeCacheLocator,
    NullCache,
    UserProvidedCacheLocator,
    UserWideCacheLocator,
)
from numba.core.runtime.nrt import rtsys

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")

_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def compiled(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """The function as machine code that runs without the GIL."""
    dispatcher: Any = numba.njit(nogil=True)(function)
    dispatcher._cache = _make_cache(function)  # as `cache=True` does, which would raise where nothing can be kept
    dispatcher._compilation_chain_init_hook = _do_nothing  # extensions of numba's are for what is compiled
    return cast(Callable[Parameters, Returned], dispatcher)


def _do_nothing() -> None:
    """Leave it to numba to load extensions (0.3 s where awkward is installed) when it compiles something."""


def _make_cache(function: Callable[..., Any]) -> Any:
    try:
        return _Cache(function)  # type: ignore[no-untyped-call]
    except RuntimeError:  # no place is good enough
        return NullCache()


class _TrustedPlace:
    """Over one of numba's ways to find a folder: refuses it unless nobody else can change what is in it."""

    def __init__(self, function: Callable[..., Any], source: str) -> None:
        super().__init__(function, source)  # type: ignore[call-arg]
        self._source = source
        # Without links, so that what is checked is what will be used.
        self._cache_path: str = os.path.realpath(self._cache_path)

    def ensure_cache_path(self) -> None:
        """Make the folder; an OSError sends numba to the next place."""
        folder, source = Path(self._cache_path), Path(self._source)
        check_trusted(folder, source)
        super().ensure_cache_path()  # type: ignore[misc]
        check_trusted(folder, source)


class _NamedFolder(_TrustedPlace, UserProvidedCacheLocator):
    """In NUMBA_CACHE_DIR."""


class _BesideModule(_TrustedPlace, InTreeCacheLocator):
    """In `__pycache__`."""


class _UserCache(_TrustedPlace, UserWideCacheLocator):
    """In the user's cache folder."""

    def __init__(self, function: Callable[..., Any], source: str) -> None:
        super().__init__(function, source)
        self._has_home = os.path.isabs(os.path.expanduser("~"))

    def ensure_cache_path(self) -> None:
        """Make the folder, but not in the current one, which is where a user without a home would have it."""
        if not self._has_home and not os.path.isabs(os.environ.get("XDG_CACHE_HOME", "")):
            raise FileNotFoundError("This user has no home.")
        super().ensure_cache_path()


class _TemporaryFolder(_TrustedPlace, InTreeCacheLocator):
    """In a folder of this user's."""

    def __init__(self, function: Callable[..., Any], source: str) -> None:
        super().__init__(function, source)
        self._own = os.path.join(os.path.realpath(tempfile.gettempdir()), f"penstock-kernels-{os.getuid()}")
        subfolder: str = self.get_suitable_cache_subpath(source)  # type: ignore[no-untyped-call]
        self._cache_path = os.path.join(self._own, subfolder)

    def ensure_cache_path(self) -> None:
        """Make the folder, for nobody else to read either."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(self._own, 0o700)
        super().ensure_cache_path()


class _Places(CompileResultCacheImpl):
    """Where to look, in this order."""

    _locator_classes = [_NamedFolder, _BesideModule, _UserCache, _TemporaryFolder]  # noqa: RUF012 numba's own is a list


class _Cache(FunctionCache):
    """Keeps what was compiled, if there is room for it."""

    _impl_class = _Places

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """What was kept, without numba's tables of types and functions: 0.3 s that only a compilation needs.

        None also if it cannot be read, and it is compiled again: where two versions of numba share a folder, the index
        can be of one and the code of the other.
        """
        rtsys.initialize(target_context)
        try:
            return self._load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except Exception:  # noqa: BLE001 whatever LLVM or pickle say of a file that is not theirs
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        with contextlib.suppress(OSError):
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]


def check_trusted(folder: Path, source: Path) -> None:
    """Refuse a folder, which need not exist yet, that somebody can change or replace who cannot change `source`.

    Raises:
        PermissionError: says who.
    """
    module = source.parent.stat()
    owners = {os.geteuid(), 0, source.stat().st_uid}
    for path in (folder, *folder.parents):
        try:
            found = path.lstat()
        except FileNotFoundError:
            continue
        writers = found.st_mode & _BY_OTHERS
        is_shared_anyway = found.st_gid == module.st_gid and not writers & ~module.st_mode
        is_sticky = path != folder and found.st_mode & stat.S_ISVTX  # only its owner can replace what is in it
        if not stat.S_ISDIR(found.st_mode) or found.st_uid not in owners:
            raise PermissionError(f"{path} belongs to user {found.st_uid}.")
        if writers and not is_sticky and not is_shared_anyway:
            raise PermissionError(f"Others can write to {path}.")
        # In a container with a user namespace, root's folders show the owner of `/`: a user without a name.
        owners.add(os.stat("/").st_uid)

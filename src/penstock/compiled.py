"""Compiled loops, cached between runs in a folder that only this user can have written to.

Compiling all of them takes half a minute, so numba caches the machine code. It runs whatever it finds in the cache, so
a folder is trusted only if anyone who can write to it could change the module as well, or is this user or root. The
first trusted folder of these is used:

    NUMBA_CACHE_DIR -> beside the module -> the user's cache folder -> this user's folder in the temporary folder

In many containers none of the first three is writable, or HOME is missing or shared. With no trusted folder, or a full
disk, each process compiles for itself.

May import: nothing. Imported by: `order`, `packing`, `plan`, `shards`, `transforms`. Holds state: files of compiled
loops, in the first trusted folder.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numba
from numba.core import types
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
    dispatcher._cache = _make_cache(function)  # like `cache=True`, which would raise where nothing can be cached
    dispatcher._compilation_chain_init_hook = _skip_extensions
    dispatcher.get_call_template = functools.partial(_resolve_call, dispatcher.get_call_template)
    return cast(Callable[Parameters, Returned], dispatcher)


def _skip_extensions() -> None:
    """Do not load numba's extensions (0.3 s if awkward is installed): numba does when it actually compiles."""


def _resolve_call(resolve: Callable[..., Any], args: tuple[Any, ...], kws: dict[str, Any]) -> Any:
    """Compile one loop called from another for its types alone.

    numba would compile it again for each constant it is called with, as in `fill(row, 0, n)`: 88 compilations instead
    of 72 before a first packed batch, which then takes a fifth longer. LLVM inlines the call and knows the constant.
    """
    unliteral: Callable[[Any], Any] = types.unliteral
    return resolve(tuple(map(unliteral, args)), {name: unliteral(kind) for name, kind in kws.items()})


def _make_cache(function: Callable[..., Any]) -> Any:
    try:
        return _Cache(function)  # type: ignore[no-untyped-call]
    except RuntimeError:  # no trusted folder
        return NullCache()


class _TrustedPlace:
    """Mixin for numba's locators: refuses a folder whose contents somebody else could change."""

    def __init__(self, function: Callable[..., Any], source: str) -> None:
        super().__init__(function, source)  # type: ignore[call-arg]
        self._source = source
        # Resolve links, so that the folder checked is the folder used.
        self._cache_path: str = os.path.realpath(self._cache_path)

    def ensure_cache_path(self) -> None:
        """Make the folder; an OSError makes numba try the next locator."""
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
        """Make the folder, but not in the current directory, where a user without a home would get it."""
        if not self._has_home and not os.path.isabs(os.environ.get("XDG_CACHE_HOME", "")):
            raise FileNotFoundError("This user has no home.")
        super().ensure_cache_path()


class _TemporaryFolder(_TrustedPlace, InTreeCacheLocator):
    """In this user's own folder under the temporary one."""

    def __init__(self, function: Callable[..., Any], source: str) -> None:
        super().__init__(function, source)
        self._own = os.path.join(os.path.realpath(tempfile.gettempdir()), f"penstock-kernels-{os.getuid()}")
        subfolder: str = self.get_suitable_cache_subpath(source)  # type: ignore[no-untyped-call]
        self._cache_path = os.path.join(self._own, subfolder)

    def ensure_cache_path(self) -> None:
        """Make the folder, unreadable by anyone else."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(self._own, 0o700)
        super().ensure_cache_path()


class _Places(CompileResultCacheImpl):
    """Where to look, in this order."""

    _locator_classes = [_NamedFolder, _BesideModule, _UserCache, _TemporaryFolder]  # noqa: RUF012 numba's own is a list


class _Cache(FunctionCache):
    """Caches machine code, if there is room for it."""

    _impl_class = _Places

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Load from the cache without numba's tables of types and functions: 0.3 s that only a compilation needs.

        Also None if the file cannot be read, so that it is compiled again: where two versions of numba share a folder,
        the index can belong to one and the code to the other.
        """
        rtsys.initialize(target_context)
        try:
            return self._load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except Exception:  # noqa: BLE001 whatever LLVM or pickle raise on a foreign file
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        with contextlib.suppress(OSError):
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]


def check_trusted(folder: Path, source: Path) -> None:
    """Refuse a folder that someone who cannot change `source` could change or replace. It need not exist yet.

    Raises:
        PermissionError: names who could.
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
        is_sticky = path != folder and found.st_mode & stat.S_ISVTX  # only an entry's owner can replace it
        if not stat.S_ISDIR(found.st_mode) or found.st_uid not in owners:
            raise PermissionError(f"{path} belongs to user {found.st_uid}.")
        if writers and not is_sticky and not is_shared_anyway:
            raise PermissionError(f"Others can write to {path}.")
        # In a container with a user namespace, root's folders appear to belong to the owner of `/`: a nameless user.
        owners.add(os.stat("/").st_uid)

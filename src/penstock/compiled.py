"""Compiled loops, kept between runs.

Compiling all of them takes half a minute, so numba keeps what it made: beside the module or, where that is read-only,
in the user's cache folder. In many containers neither is writable, and numba gives up with an error, as it does when
a quota is used up. Here a folder of this user's in the temporary one comes next, and without that each process compiles
for itself.

May import: nothing. Imported by: `order`, `packing`, `plan`, `shards`, `transforms`. Holds no state.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import numba
from numba.core.caching import FunctionCache, NullCache

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


def compiled(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """The function as machine code that runs without the GIL."""
    dispatcher: Any = numba.njit(nogil=True)(function)
    dispatcher._cache = _make_cache(function)  # as `cache=True` does, which would raise where nothing can be kept
    return cast(Callable[Parameters, Returned], dispatcher)


class _Cache(FunctionCache):
    """Keeps what was compiled, if there is room for it."""

    def save_overload(self, sig: Any, data: Any) -> None:
        with contextlib.suppress(OSError):
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]


def _make_cache(function: Callable[..., Any]) -> Any:
    try:
        return _Cache(function)  # type: ignore[no-untyped-call]
    except RuntimeError:  # not in NUMBA_CACHE_DIR, not beside the module, not in the user's cache folder
        pass
    try:
        numba.config.CACHE_DIR = _own_temporary_folder()  # type: ignore[attr-defined]
        return _Cache(function)  # type: ignore[no-untyped-call]
    except (RuntimeError, OSError):
        return NullCache()


def _own_temporary_folder() -> str:
    """One that nobody else can write to: what is in it will be run."""
    folder = os.path.join(tempfile.gettempdir(), f"penstock-kernels-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not this user's alone.")
    return folder

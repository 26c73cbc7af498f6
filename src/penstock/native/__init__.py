"""The C library with the loops that Python is too slow for: found, loaded, and called without the GIL.

Each room keeps its loops in a `_kernels.c` beside the `_kernels.py` that declares them; `kernels.h` says what all of
them follow. All are compiled into one library when Penstock is built, which knows nothing of Python's versions, and on
x86-64 a second time for processors with AVX2 (x86-64-v3: 40 % faster when ids are widened). Loading takes 1 ms.

    installed    the library came with the package; nothing is ever compiled
    checkout     a library that was made from other sources is compiled again, once, if there is a compiler (5 s)

`PENSTOCK_KERNELS` names another library, such as one with sanitizers.

May import: nothing. Imported by: `order`, `packing`, `plan`, `remote`, `shards`, `transforms`. Holds no state.
"""

import ctypes
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from penstock.native import _build

ARRAY, INT, WORD = ctypes.py_object, ctypes.c_int64, ctypes.c_uint64
"""What kernels take: numpy arrays, and numbers with and without a sign."""

_REFUSED = -(2**63)


def kernel(name: str, *arguments: Any) -> Callable[..., int]:
    """A function of the library that takes these arguments and returns an int.

    Raises:
        ImportError: there is no library that fits; the message has the command that makes one.
    """
    function: Any = _load_library()[name]
    function.argtypes, function.restype, function.errcheck = arguments, INT, _check
    return function  # type: ignore[no-any-return]


def _check(result: int, function: Any, arguments: tuple[Any, ...]) -> int:
    if result == _REFUSED:
        found = (f"{each.dtype}{list(each.shape)}" if isinstance(each, np.ndarray) else each for each in arguments)
        raise TypeError(f"{function.__name__} does not take {', '.join(map(str, found))}.")
    return result


@functools.cache
def _load_library() -> ctypes.CDLL:
    if named := os.environ.get("PENSTOCK_KERNELS"):
        return _load(Path(named))
    folder = Path(_build.__file__).parent
    if _build.sources():
        _build_if_changed(folder)
    library = _load(folder / _build.LIBRARY)
    if not library.has_v3():
        return library
    return _load(folder / _build.LIBRARY_V3)


def _build_if_changed(folder: Path) -> None:
    if _build.is_current(folder / _build.LIBRARY, _build.source_digest()):
        return
    try:
        _build.build(folder)
    except (_build.BuildError, OSError) as error:
        raise ImportError(
            f"Penstock's C library in {folder} was not built from the sources beside it, and cannot be built: {error}\n"
            f"Install a C compiler, or run: {sys.executable} -m pip install --editable {folder.parents[2]}"
        ) from error


def _load(path: Path) -> ctypes.CDLL:
    """Load a library, and make sure that it understands the arrays of this Python and this numpy."""
    try:
        library = ctypes.CDLL(os.fspath(path))
        library.set_object_header(INT(object.__basicsize__))
        sample, seen = np.zeros((2, 3), np.float32), (ctypes.c_int64 * 5)()
        library.describe(ARRAY(sample), seen)
    except (OSError, AttributeError) as error:
        raise ImportError(
            f"Penstock's C library {path} cannot be loaded: {error}. "
            f"Install it again: {sys.executable} -m pip install --force-reinstall --no-deps penstock"
        ) from None
    expected = [sample.ctypes.data, sample.size, sample.itemsize, ord(sample.dtype.kind), True]
    if list(seen) != expected:
        raise ImportError(
            f"Penstock's C library {path} cannot read the arrays of numpy {np.__version__} "
            f"under {sys.implementation.name} {sys.version.split()[0]}: use CPython, and another version of numpy."
        )
    return library

"""The door to the compiled kernels of this room."""

from __future__ import annotations

import functools
from types import ModuleType


@functools.cache
def kernels() -> ModuleType:
    """The kernels, imported with numba (0.4 s) when the first row is read."""
    from penstock.plan import _kernels

    return _kernels

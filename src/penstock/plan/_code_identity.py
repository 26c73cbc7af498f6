"""What tells one mapped function from another, in any process and under any hash seed.

Name, compiled code, defaults, and the plain values that a closure, a partial or an object carries. What
lies behind a name (a global, a function that is called) is not followed: a change there goes unseen.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence, Set
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np

_MAX_DEPTH = 8


def identity_of(function: Callable[..., Any]) -> str:
    """Name and digest of a function: changes when what it does changes, as far as it can be seen from outside."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    digest = hashlib.blake2b(_describe(function, 0).encode(), digest_size=8).hexdigest()
    return f"{getattr(function, '__module__', '?')}:{name} {digest}"


def names_in(function: Callable[..., Any]) -> frozenset[str]:
    """Globals, attributes and modules that a function's own code names."""
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return _names(code) if isinstance(code, CodeType) else frozenset()


def _names(code: CodeType) -> frozenset[str]:
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*inner)


def _describe(value: Any, depth: int) -> str:
    """`value` in words that hold no address and no order that a hash decides."""
    describe = functools.partial(_describe, depth=depth + 1)
    if depth > _MAX_DEPTH:  # a function may hold itself
        return type(value).__qualname__
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        array = np.ascontiguousarray(value)
        return f"{array.dtype}{array.shape}{hashlib.blake2b(array.tobytes(), digest_size=8).hexdigest()}"
    if isinstance(value, CodeType):
        return f"code({value.co_code.hex()}, {value.co_names}, {describe(value.co_consts)})"
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        parts = [value.__code__, value.__defaults__, value.__kwdefaults__, cells]
        return f"{value.__module__}:{value.__qualname__}{describe(parts)}"
    if isinstance(value, functools.partial):
        return f"partial{describe([value.func, value.args, value.keywords])}"
    if isinstance(value, MethodType):
        return f"method{describe([value.__func__, value.__self__])}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{describe(key)}: {describe(item)}' for key, item in value.items()))}}}"
    if isinstance(value, Set):
        return f"{{{', '.join(sorted(map(describe, value)))}}}"
    if isinstance(value, Sequence):
        return f"[{', '.join(map(describe, value))}]"
    state = getattr(value, "__dict__", {}) if not isinstance(value, type) else {}
    call = getattr(type(value).__call__, "__code__", None) if callable(value) else None
    name = getattr(value, "__qualname__", "")
    return f"{type(value).__module__}:{type(value).__qualname__} {name}{describe([state, call])}"


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - asking is the only way to know
    except ValueError:
        return False
    return True

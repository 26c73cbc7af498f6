"""When two things are the same: digests, functions, and the names that functions are imported by.

    digest        hexadecimal hash of bytes; says nothing about what they are
    identity      the facts that decide whether two things are the same, as JSON or as text
    fingerprint   digest of the identity of a dataset, a plan or an order: what users compare

Whether two functions are the same has two answers, and both are stored, so both stay:

    source_digest       a hash of the source text. A manifest keeps it: it must be the same under every Python, and a
                        changed comment may cost a second preparation.
    function_identity   name and compiled code, with the values it carries. Part of a plan's fingerprint: it must see
                        closures and partials, and may change with the version of Python.

A function is named "package.module:function", which `name_function` writes and `import_function` reads.

May import: nothing. Imported by: `dataset`, `plan`, `preparation`, `shards`, `sources`, `transforms`. Holds no state.
"""

import functools
import hashlib
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np

_MAX_DEPTH = 8


def digest(content: bytes | memoryview | str, num_bytes: int = 16) -> str:
    """Hexadecimal BLAKE2b hash of bytes or text.

    >>> digest("penstock", 4)
    '4d145d07'
    """
    data = content.encode() if isinstance(content, str) else content
    return hashlib.blake2b(data, digest_size=num_bytes).hexdigest()


class GrowingDigest:
    """Digests of growing text or bytes: each equals `digest` of all of it so far."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, content: str | bytes) -> str:
        """The digest with this added.

        >>> growing = GrowingDigest()
        >>> growing.add("pen") == digest("pen"), growing.add("stock") == digest("penstock")
        (True, True)
        """
        self._hash.update(content.encode() if isinstance(content, str) else content)
        return self._hash.hexdigest()


def digest_json(value: Any) -> str:
    """Digest of plain data, whatever the order of its keys.

    >>> digest_json({"a": 1, "b": 2}) == digest_json({"b": 2, "a": 1})
    True
    """
    return digest(json.dumps(value, sort_keys=True, separators=(",", ":")))


def name_function(function: Callable[..., Any]) -> str:
    """A readable name for a function: its import path, or a partial of one. It need not lead back to the function.

    >>> name_function(functools.reduce)
    '_functools:reduce'
    """
    if isinstance(function, functools.partial):
        return f"partial({name_function(function.func)}, {function.args}, {function.keywords})"
    owner = function if hasattr(function, "__qualname__") else type(function)
    return f"{owner.__module__}:{owner.__qualname__}"


def importable_name(function: Callable[..., Any]) -> str:
    """The import path that leads back to a function.

    Raises:
        ValueError: there is none: it is a lambda, a local function, or defined in `__main__`.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if module is None or name is None or "<" in name or module == "__main__":
        raise ValueError(
            f"{name or repr(function)} cannot be named in a file: "
            "only functions at the top level of an importable module can. Move it to one."
        )
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not function:
        raise ValueError(f"{module}:{name} does not lead back to the function; a file needs an import path that does.")
    return f"{module}:{name}"


def import_function(path: str) -> Callable[..., Any]:
    """The function that an import path leads to.

    Raises:
        TypeError: it leads to something that cannot be called.
        ValueError: it is not an import path, or leads nowhere.

    >>> import_function("string:capwords")("a b")
    'A B'
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ValueError(f"{path!r} is not an import path; write 'package.module:function'.")
    found = _find(module_name, name)
    if not callable(found):
        raise TypeError(f"{path} is not a function: {found!r} is not callable.")
    return found  # type: ignore[no-any-return]


def source_digest(function: Callable[..., Any]) -> str:
    """SHA-256 of a function's source; of its name where there is no source."""
    target: Any = function.func if isinstance(function, functools.partial) else function
    if not (inspect.isfunction(target) or inspect.ismethod(target) or inspect.isclass(target)):
        target = type(target)
    try:
        text = inspect.getsource(target)
    except (OSError, TypeError):
        text = name_function(function)
    return hashlib.sha256(text.encode()).hexdigest()


def function_identity(function: Callable[..., Any]) -> str:
    """Name and digest of a function: changes when what it does changes, as far as that is visible from outside.

    The same in every process and under every hash seed. It covers code, defaults, and the plain values carried by a
    closure, a partial or an object. Names (a global, a function it calls) are not followed.
    """
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', '?')}:{name} {digest(_describe(function, 0), 8)}"


def names_used(function: Callable[..., Any]) -> frozenset[str]:
    """Globals, attributes and modules that a function's own code refers to."""
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return _names(code) if isinstance(code, CodeType) else frozenset()


def _find(module_name: str, name: str) -> Any:
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):  # an import inside the module
            raise
        raise ValueError(
            f"No module {error.name!r} for the function '{module_name}:{name}'. Check PYTHONPATH."
        ) from None
    try:
        return functools.reduce(getattr, name.split("."), module)
    except AttributeError:
        where = getattr(module, "__file__", None) or module_name
        raise ValueError(f"{where} has no function {name!r}. Check the spelling.") from None


def _names(code: CodeType) -> frozenset[str]:
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*inner)


def _describe(value: Any, depth: int) -> str:
    """A description of `value` without memory addresses or hash-dependent order."""
    describe = functools.partial(_describe, depth=depth + 1)
    if depth > _MAX_DEPTH:  # a function may refer to itself
        return type(value).__qualname__
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        array = np.ascontiguousarray(value)
        return f"{array.dtype}{array.shape}{digest(array.tobytes(), 8)}"
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

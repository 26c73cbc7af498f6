"""Values sent to worker processes, and how to import the user's script if they contain a function from it."""

from __future__ import annotations

import functools
import os
import pickle
import runpy
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_SCRIPT_NAMES = (b"__main__", b"__mp_main__")
"""The module that a script's functions belong to: run as a program, or imported by a spawned process such as a rank."""
_GUARD = "Put what the script does under `if __name__ == '__main__':`, or move the function to its own module."
_is_importing_script = False
"""Whether this worker is importing the user's script, which must not start workers of its own then."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A pickled value. The user's script is imported only if the value contains a function from it."""

    data: bytes | memoryview
    script: dict[str, Any] | None
    """How to import it, as `multiprocessing.spawn.prepare` expects it; `package` names a package with a `__main__`."""

    @classmethod
    def pack(cls, value: Any, *, otherwise: str, dump: Callable[[Any], bytes] = pickle.dumps) -> Packed:
        """Pickle a value; `otherwise` ends the advice in an error: the alternative to using a module.

        Raises:
            TypeError: it cannot be pickled, or contains a function from an interactive session.
        """
        try:
            data = dump(value)
        except Exception as error:
            raise TypeError(
                f"What worker processes are to do cannot be sent to them: {error}. "
                f"Put functions and classes at the top of a module, or {otherwise}"
            ) from error
        return cls(data, _find_script(otherwise) if any(name in data for name in _SCRIPT_NAMES) else None)

    def load(self, buffers: Sequence[memoryview] = ()) -> Any:
        """The value, in the process it was sent to, given the buffers that `dump` set aside."""
        if self.script is not None:
            _import_script(self.script)
        return pickle.loads(self.data, buffers=buffers)  # noqa: S301 - sent by the owner of this process


def needs_torch(functions: Iterable[Callable[..., Any]]) -> bool:
    """Whether a worker that is sent these functions imports torch, as far as this process can see.

    It imports their modules, or the user's script, with all modules and packages that these take names from.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    modules, packages = [_module_of(function) for function in functions], set()
    for name in modules:  # which grows
        package = name.partition(".")[0]
        for other in _modules_named_in(name):
            if other.partition(".")[0] != package:
                packages.add(other.partition(".")[0])
            elif other not in modules:
                modules.append(other)
    packages.discard("penstock")  # which imports torch only for who asks
    return any(
        module is torch or getattr(module, "__dict__", {}).get("torch") is torch
        for name, module in list(sys.modules.items())
        if name in modules or name.partition(".")[0] in packages
    )


def _module_of(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__module__", None) or type(function).__module__


def _modules_named_in(name: str) -> Iterator[str]:
    """The modules that a module takes names from, and the package that it is in."""
    if "." in name:
        yield name.rpartition(".")[0]
    for value in list(getattr(sys.modules.get(name), "__dict__", {}).values()):
        owner = value if isinstance(value, type | types.FunctionType) else type(value)
        found: object = value.__name__ if isinstance(value, types.ModuleType) else owner.__module__
        if isinstance(found, str):
            yield found


def is_importing_script() -> bool:
    """Whether this process is a worker that is importing the user's script."""
    return _is_importing_script


def check_not_importing_script() -> None:
    """Refuse to start workers from a script that a worker is importing: it would never end."""
    if is_importing_script():
        raise RuntimeError(
            f"This script starts worker processes while a worker imports it to find one of its functions. {_GUARD}"
        )


def _import_script(script: dict[str, Any]) -> None:
    global _is_importing_script
    from multiprocessing import spawn

    _is_importing_script = True
    try:
        spawn.prepare(script)
        if "package" in script:
            _import_package(script["package"])
    except (Exception, SystemExit) as error:  # as from a dataset that the script is just preparing
        if _GUARD in str(error):
            raise
        found = f"{type(error).__name__}: {error}".rstrip(": ")
        raise RuntimeError(
            f"A worker imports this script to find one of its functions, and that ended with {found}\n{_GUARD}"
        ) from error
    finally:
        _is_importing_script = False


def _import_package(name: str) -> None:
    """Run a package's `__main__` as a spawned process's script, which `multiprocessing` does not do."""
    main = types.ModuleType("__mp_main__")
    main.__dict__.update(runpy.run_module(name, run_name="__mp_main__", alter_sys=True))
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main


def _find_script(otherwise: str) -> dict[str, Any]:
    main = sys.modules["__main__"]
    found = {"sys_path": list(sys.path), "sys_argv": list(sys.argv)}
    name = getattr(getattr(main, "__spec__", None), "name", None)
    if name is not None and name != "__main__":  # "__main__" is a folder or an archive, run by its path
        return {**found, "package" if name.endswith(".__main__") else "init_main_from_name": name}
    path = getattr(main, "__file__", None)
    if path is None or not os.path.exists(path):  # "<stdin>"
        raise TypeError(
            "A function or class is defined in a notebook or an interactive session, where worker processes cannot "
            f"find it. Put it in a module (a cell can write one: `%%writefile functions.py`), or {otherwise}"
        )
    return {**found, "init_main_from_path": os.path.abspath(path)}

"""The user's script, which workers import to find its functions, as `multiprocessing` does when it spawns.

What the script does at its top level is done again then. Workers that start workers would never end, so this is
refused: by the owner at once, where it sees that the line that is running is in no branch; else by the worker.
"""

import ast
import os
import runpy
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.errors import ScriptError

SCRIPT_NAMES = (b"__main__", b"__mp_main__")
"""The module that a script's functions belong to: run as a program, or imported by a spawned process such as a rank."""
_GUARD = "Put what the script does under `if __name__ == '__main__':`, or move the function to its own module."
_is_importing_script = False
"""Whether this worker is importing the user's script, which must not start workers of its own then."""


def is_importing_script() -> bool:
    """Whether this process is a worker that is importing the user's script."""
    return _is_importing_script


def check_not_importing_script() -> None:
    """Refuse to start workers from a script that a worker is importing: it would never end."""
    if is_importing_script():
        raise RuntimeError(
            f"This script starts worker processes while a worker imports it to find one of its functions. {_GUARD}"
        )


def import_script(script: dict[str, Any]) -> None:
    """In a worker: import it as `find_script` said."""
    global _is_importing_script
    from multiprocessing import spawn

    _is_importing_script = True
    try:
        spawn.prepare(script)
        if "package" in script:
            _import_package(script["package"])
    except (Exception, SystemExit) as error:  # as from a dataset that the script is just preparing
        if _GUARD in str(error):
            raise RuntimeError(str(error)) from None  # the frames in which we noticed it would tell nobody anything
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


def find_script(otherwise: str) -> dict[str, Any]:
    """How to import the script, as `multiprocessing.spawn.prepare` expects it; `package` names one with a `__main__`.

    Raises:
        ScriptError: the script would start workers again, or is an interactive session.
    """
    main = sys.modules["__main__"]
    _check_guarded(main)
    found = {"sys_path": list(sys.path), "sys_argv": list(sys.argv)}
    name = getattr(getattr(main, "__spec__", None), "name", None)
    if name is not None and name != "__main__":  # "__main__" is a folder or an archive, run by its path
        return {**found, "package" if name.endswith(".__main__") else "init_main_from_name": name}
    path = getattr(main, "__file__", None)
    if path is None or not os.path.exists(path):  # "<stdin>"
        raise ScriptError(
            "A function or class is defined in a notebook or an interactive session, where worker processes cannot "
            f"find it. Put it in a module (a cell can write one: `%%writefile functions.py`), or {otherwise}"
        )
    return {**found, "init_main_from_path": os.path.abspath(path)}


def _check_guarded(main: types.ModuleType) -> None:
    """Refuse to start workers from a line of the script that a worker runs, too, when it imports the script."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and not (frame.f_code.co_name == "<module>" and frame.f_globals is vars(main)):
        frame = frame.f_back
    if frame is None:
        return
    path, line = Path(frame.f_code.co_filename), frame.f_lineno
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):  # a worker that cannot import it says so
        return
    if _is_always_run(body, line):
        raise ScriptError(
            f"{path.name}, line {line}, starts worker processes whenever the script is imported, and each of them "
            f"imports it to find one of its functions. {_GUARD}"
        )


def _is_always_run(body: Sequence[ast.stmt], line: int) -> bool:
    """Whether a line that is running is in no branch: of loops, `with` and `try`, as far as the body goes."""
    here = next((each for each in body if each.lineno <= line <= (each.end_lineno or line)), None)
    if isinstance(here, ast.For | ast.While | ast.With | ast.Try):
        return line < here.body[0].lineno or _is_always_run(here.body, line)
    return here is not None and not isinstance(here, ast.If | ast.Match)

"""Runs first in every Python process of a script under the doctor, and waits until one imports torch's DataLoader.

The doctor puts this folder in front of `PYTHONPATH`, which ranks, spawned workers, fork servers and subprocesses
inherit. It removes itself from `sys.path`, runs the `sitecustomize` that it shadows, and imports nothing of
Penstock before a loader can exist. Whatever goes wrong in here, the script runs as it would have.
"""

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

_HERE = os.path.dirname(os.path.abspath(__file__))
_PACKAGES = os.path.dirname(os.path.dirname(os.path.dirname(_HERE)))
_INSTALLERS = {
    "torch.utils.data.dataloader": "watch_torch",
    "torch.optim.optimizer": "watch_optimizers",
    "penstock.pytorch._dataloader": "watch_penstock",
}


class _AfterImport:
    """Finds modules as usual, and calls the doctor after those that it waits for."""

    def __init__(self) -> None:
        self._searching: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec that others find, with a loader that calls back."""
        if name not in _INSTALLERS or name in self._searching:
            return None
        self._searching.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching.discard(name)
        if spec is not None and spec.loader is not None:
            _call_after(spec.loader, _INSTALLERS[name])
        return spec


def _call_after(loader: object, installer: str) -> None:
    execute: Callable[[ModuleType], None] = loader.exec_module  # type: ignore[attr-defined]

    def execute_and_install(module: ModuleType) -> None:
        execute(module)
        try:
            _install(installer, module)
        except Exception as error:  # noqa: BLE001 - the script must run; the report says what it could not see
            _say(f"{type(error).__name__}: {error}")

    loader.exec_module = execute_and_install  # type: ignore[attr-defined]


def _install(installer: str, module: ModuleType) -> None:
    """Import Penstock from where the doctor runs, also in an environment that has no Penstock."""
    is_found = importlib.util.find_spec("penstock") is not None
    if not is_found:
        sys.path.append(_PACKAGES)
    try:
        hooks = importlib.import_module("penstock.doctor._hooks")
    finally:
        if not is_found:
            sys.path.remove(_PACKAGES)
    getattr(hooks, installer)(module)


def _say(reason: str) -> None:
    """Leave a note where the doctor looks."""
    import json

    line = json.dumps({"fact": "blind", "pid": os.getpid(), "reason": reason}) + "\n"
    try:
        with open(os.path.join(os.environ["PENSTOCK_DOCTOR"], "facts.jsonl"), "a") as facts:
            facts.write(line)
    except OSError:  # the doctor has gone, and its folder with it
        return


def _give_way() -> None:
    """Run the `sitecustomize` that would have run without this one."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


try:
    if os.path.isdir(os.environ.get("PENSTOCK_DOCTOR", "")):
        sys.meta_path.insert(0, _AfterImport())
finally:
    _give_way()

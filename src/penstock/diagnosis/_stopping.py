"""The end of a run that was looked at long enough.

`Stop` leaves the script from `next()`, as `SystemExit` does: nothing is printed, `except Exception` does not catch it,
`finally` and `atexit` run, and the process ends with 0. What a script saves on its way out would be a model that saw
some batches twice, so from then on the usual functions that save checkpoints write nothing, and say so to the doctor.
"""

from __future__ import annotations

import sys
from typing import Any

from penstock.diagnosis._recorder import recorder

_SAVERS = (
    ("torch", "save", 1),
    ("torch.distributed.checkpoint", "save", None),
    ("safetensors.torch", "save_file", 1),
    ("safetensors.torch", "save_model", 1),
)
"""Module, function, and which argument says where to."""


class Stop(SystemExit):
    """The doctor has seen enough."""

    def __init__(self) -> None:
        super().__init__(0)


def protect_checkpoints() -> None:
    """Let nothing be saved by what runs on the way out."""
    for module, name, place in _SAVERS:
        found = sys.modules.get(module)
        if found is not None and hasattr(found, name):
            setattr(found, name, _refuser(f"{module}.{name}", place))


def _refuser(name: str, place: int | None) -> Any:
    def save_nothing(*arguments: Any, **options: Any) -> None:
        target = options.get("f") or options.get("filename") or options.get("checkpoint_id")
        if target is None and place is not None and len(arguments) > place:
            target = arguments[place]
        recorder().note("not-saved", function=name, target=str(target))

    return save_nothing

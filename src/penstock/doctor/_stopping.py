"""How a script is stopped: at a step at which all ranks stop, without an error, and without a checkpoint of this run.

`SystemExit` leaves the script from `next()`: nothing is printed, `except Exception` does not catch it, `finally` and
`atexit` run, and the process ends with 0. What a script saves on its way out would be a model that saw some batches
twice, so from then on the usual functions that save checkpoints write nothing, and say so to the doctor.

`UnfedTraining` stops a script whose optimizer steps while no loader is asked for a batch: with a hand-written
`get_batch()`, or with batches that `itertools.cycle` keeps, there would be no report until training ends.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

from penstock.doctor._board import Board, Notice, Ranks
from penstock.doctor._experiment import AS_IS
from penstock.doctor._recorder import Recorder, RunSettings, recorder

_PATIENCE_SECONDS = 30.0
_SEVERAL = 3
"""Some scripts make many steps of each batch: only several times as many mean that no more batches will come."""

_SAVERS = (
    ("torch", "save", 1),
    ("torch.distributed.checkpoint", "save", None),
    ("safetensors.torch", "save_file", 1),
    ("safetensors.torch", "save_model", 1),
)
"""Module, function, and the argument that says where to."""


def protect_checkpoints() -> None:
    """Have the functions that save checkpoints write nothing from now on."""
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


class UnfedTraining:
    """Counts an optimizer's steps; when they go on for long without a batch, all ranks stop at the same one."""

    def __init__(self, *, log: Recorder, board: Board, ranks: Ranks, settings: RunSettings) -> None:
        self._log, self._board, self._ranks, self._settings = log, board, ranks, settings
        self._began_at = time.monotonic()
        self._was_announced = False
        self._num_batches = self._steps_since = self._most_steps = 0
        self.num_steps = 0
        self.thread = 0
        """The thread that trains."""

    def count(self, num_batches: int) -> None:
        """An optimizer made a step, after `num_batches` from loaders."""
        self.num_steps += 1
        self.thread = threading.get_ident()
        if num_batches != self._num_batches:
            self._most_steps = max(self._most_steps, self._steps_since)
            self._num_batches, self._steps_since, self._began_at = num_batches, 0, time.monotonic()
        self._steps_since += 1
        if self._ranks.is_first and not self._was_announced and self._is_long():
            self._was_announced = True
            self._log.note("unfed", steps=self._steps_since, batches=num_batches)
            if not self._settings["full"]:
                stops_at = self.num_steps + self._ranks.margin
                self._board.write(Notice(AS_IS.number, stops_at, False, stops_at, 1))

    def is_time_to_stop(self) -> bool:
        """Whether the step is reached at which all ranks stop."""
        return self.num_steps >= self._board.read().stops_at

    def _is_long(self) -> bool:
        most_steps = self._settings["steps"]
        if not self._num_batches and most_steps is not None and self.num_steps >= most_steps:
            return True
        seconds = min(_PATIENCE_SECONDS, self._settings["seconds"])
        return self._steps_since > _SEVERAL * self._most_steps and time.monotonic() - self._began_at > seconds

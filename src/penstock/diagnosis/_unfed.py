"""Training that gets its batches from no loader: its optimizer steps, and nothing is there to look at.

Whoever writes `get_batch()` by hand would otherwise wait for a report until training ends. Steps are counted until a
loader gives a batch; when they go on for long without one, all ranks stop at the same step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from penstock.diagnosis._board import Board, Notice
from penstock.diagnosis._experiment import AS_IS
from penstock.diagnosis._ranks import Ranks
from penstock.diagnosis._recorder import Recorder

_PATIENCE_SECONDS = 30.0
_MARGIN = 4


class UnfedTraining:
    """Counts an optimizer's steps."""

    def __init__(self, *, log: Recorder, board: Board, ranks: Ranks, settings: Mapping[str, Any]) -> None:
        self._log, self._board, self._ranks, self._settings = log, board, ranks, settings
        self._began_at = time.monotonic()
        self._was_announced = False
        self.num_steps = 0

    def count(self) -> None:
        """An optimizer made a step."""
        self.num_steps += 1
        if self._ranks.is_first and not self._was_announced and self._is_long():
            self._was_announced = True
            self._log.note("unfed", steps=self.num_steps)
            if not self._settings["full"]:
                stops_at = self.num_steps + (_MARGIN if self._ranks.world_size > 1 else 0)
                self._board.write(Notice(AS_IS.number, stops_at, False, stops_at, 1))

    def is_time_to_stop(self) -> bool:
        """Whether the step is reached at which all ranks stop."""
        return self.num_steps >= self._board.read().stops_at

    def _is_long(self) -> bool:
        most_steps: int | None = self._settings["steps"]
        seconds = min(_PATIENCE_SECONDS, float(self._settings["seconds"]))
        out_of_steps = most_steps is not None and self.num_steps >= most_steps
        return out_of_steps or time.monotonic() - self._began_at > seconds

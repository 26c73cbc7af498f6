"""How a script is stopped: at a step at which all ranks stop, without an error, and without a checkpoint of this run.

All ranks read one *notice* on a board, because they must change turns together, or each would wait for the other. Rank
0 writes that a turn begins at a step that no rank can have reached; every rank counts its own steps. The board is a
mapped file of five numbers; one rank writes it, and each step looks whether there is a new notice: under 1 µs.

`SystemExit` leaves the script from `next()`: nothing is printed, `except Exception` does not catch it, `finally` and
`atexit` run, and the process ends with 0. What a script saves on its way out would be a model that saw some batches
twice, so from then on the usual functions that save checkpoints write nothing, and say so to the doctor.

`TrainingWithoutLoader` stops a script whose optimizer steps while no loader is asked for a batch: with a hand-written
`get_batch()`, or with batches that `itertools.cycle` keeps, there would be no report until training ends.
"""

import mmap
import os
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from penstock.doctor._experiment import AS_IS
from penstock.doctor._recording import Recorder, RunSettings, recorder

_NUMBERS, _NUMBER = struct.Struct("<qqqqq"), struct.Struct("<q")
NEVER = 1 << 62
_MARGIN = 4
_PATIENCE_SECONDS = 30.0
_SEVERAL = 3
"""Some scripts make many steps of each batch: only several times as many mean that no more batches will come."""
_TRAINER_SECONDS = 5.0
"""How long a thread that fetches batches goes on after the stop, for the thread that trains to make a step."""
_FETCHER_SECONDS = 2.0

_SAVERS = (
    ("torch", "save", 1),
    ("torch.distributed.checkpoint", "save", None),
    ("safetensors.torch", "save_file", 1),
    ("safetensors.torch", "save_model", 1),
)
"""Module, function, and the argument that says where to."""


class Ranks(NamedTuple):
    """The rank of this process, and how many there are."""

    rank: int
    world_size: int

    @property
    def is_first(self) -> bool:
        """Whether this process decides for all."""
        return self.rank == 0

    @property
    def margin(self) -> int:
        """Steps between an announcement and what it announces, so that all ranks see it in time."""
        return _MARGIN if self.world_size > 1 else 0


def find_ranks() -> Ranks:
    """What torch.distributed says, or the variables that launchers set."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return Ranks(int(distributed.get_rank()), int(distributed.get_world_size()))
    return Ranks(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))


class Notice(NamedTuple):
    """What the board says."""

    trial: int
    begins_at: int
    """Step of the loop, as each rank counts."""
    whole_epochs: bool
    """Whether the turn begins with an epoch."""
    stops_at: int
    number: int
    """Counts notices. Written last: a rank that sees it sees the rest."""


class Board:
    """A notice that all ranks of a job see."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(descriptor).st_size < _NUMBERS.size:
                os.posix_fallocate(descriptor, 0, _NUMBERS.size)  # writing to a map without room on disk raises SIGBUS
            self._map = mmap.mmap(descriptor, _NUMBERS.size)
        finally:
            os.close(descriptor)
        self._notice = self._read()

    def read(self) -> Notice:
        """The notice; before the first one, number 0 and never a stop."""
        if _NUMBER.unpack_from(self._map, _NUMBERS.size - _NUMBER.size)[0] != self._notice.number:
            self._notice = self._read()
        return self._notice

    def write(self, notice: Notice) -> None:
        """Put up a notice."""
        _NUMBERS.pack_into(self._map, 0, *notice)

    def _read(self) -> Notice:
        trial, begins_at, whole, stops_at, number = _NUMBERS.unpack_from(self._map)
        return Notice(trial, begins_at, bool(whole), stops_at or NEVER, number)


class TrainingWithoutLoader:
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


class Exit:
    """The way out of a script, which is open from the moment at which this is made."""

    def __init__(self) -> None:
        _protect_checkpoints()
        self._opened_at = time.monotonic()
        self._trainer_left, self._fetcher_left = threading.Event(), threading.Event()
        self._fetches_in_thread = False

    def leave(self, trainer: int | None) -> None:
        """End the script, unless this thread only fetches batches for the one that trains: `trainer` leaves first.

        Raises:
            SystemExit: in the thread that leaves.
        """
        is_main = threading.current_thread() is threading.main_thread()
        if is_main or trainer is None or trainer == threading.get_ident():
            self._trainer_left.set()
            if self._fetches_in_thread:
                self._fetcher_left.wait(_FETCHER_SECONDS)  # or it would be cut off somewhere in torch
        elif not self._trainer_left.is_set() and time.monotonic() < self._opened_at + _TRAINER_SECONDS:
            self._fetches_in_thread = True
            return
        else:
            self._fetcher_left.set()
        raise SystemExit(0)


def _protect_checkpoints() -> None:
    """Have the functions that save checkpoints write nothing from now on."""
    for module, name, target_argument in _SAVERS:
        found = sys.modules.get(module)
        if found is not None and hasattr(found, name):
            setattr(found, name, _refuser(f"{module}.{name}", target_argument))


def _refuser(name: str, target_argument: int | None) -> Any:
    def save_nothing(*arguments: Any, **options: Any) -> None:
        target = options.get("f") or options.get("filename") or options.get("checkpoint_id")
        if target is None and target_argument is not None and len(arguments) > target_argument:
            target = arguments[target_argument]
        recorder().note("not-saved", function=name, target=str(target))

    return save_nothing

"""What a process under the doctor records: events in its own file, rare facts as lines of JSON in one file for all.

Children begin files of their own after a fork. A line is one write to a file opened for appending, so that lines of
several processes do not mix.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from functools import cache
from pathlib import Path
from typing import Any, TypedDict

from penstock.machine import EventWriter, read_process

FOLDER_VARIABLE = "PENSTOCK_DOCTOR"
FACTS, SETTINGS = "facts.jsonl", "settings.json"


class RunSettings(TypedDict):
    """What the doctor leaves for the processes of a script: `DoctorSettings`, and who it is."""

    seconds: float
    steps: int | None
    full: bool
    observe: bool
    turn_seconds: float
    doctor: list[int] | None
    """As `name_process` names it."""


class _Nowhere:
    """Discards events."""

    def add(self, *what: Any, **more: Any) -> None:
        """Do nothing."""


class Recorder:
    """Writes for one process; nothing once the doctor has ended and its folder is gone."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.pid = folder, os.getpid()
        self.worker = -1
        """The number of this process among its loader's workers; -1 in a trainer."""
        self.loader = self.trial = self.sequence = 0
        """Which loader and trial a worker makes batches for, and the number of the batch it is making."""
        self.memory_due_at = self.num_memory_looks = 0
        """When a worker looks at its memory again, and how often it did."""
        self._events: EventWriter | _Nowhere | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether the doctor is still there to read it."""
        return self.folder.is_dir()

    @property
    def events(self) -> EventWriter | _Nowhere:
        """The file of this process, made when something happens."""
        if self._events is None:
            try:
                self._events = EventWriter(self.folder / f"{self.pid}-{time.monotonic_ns()}.events")
            except OSError:
                self._events = _Nowhere()
        return self._events

    def add(
        self,
        kind: int,
        start_ns: int,
        end_ns: int,
        *,
        sequence: int | None = None,
        cpu_seconds: float = 0.0,
        value: int = 0,
        extra: int = 0,
    ) -> None:
        """Write an event of the batch that this process works on, or of the batch with the number `sequence`."""
        self.events.add(
            kind,
            start_ns,
            end_ns,
            loader=self.loader,
            trial=self.trial,
            worker=self.worker,
            sequence=self.sequence if sequence is None else sequence,
            cpu_seconds=cpu_seconds,
            value=value,
            extra=extra,
        )

    def note(self, fact: str, **fields: Any) -> None:
        """Write a fact."""
        line = json.dumps({"fact": fact, "pid": self.pid, "time": time.perf_counter(), **fields}, default=repr) + "\n"
        with contextlib.suppress(OSError):  # a full disk, or a missing folder, must not disturb the script
            descriptor = os.open(self.folder / FACTS, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.write(descriptor, line.encode())
            finally:
                os.close(descriptor)


def name_process(pid: int) -> list[int] | None:
    """A name that no other process will ever have; None if there is no such process, or it cannot be read."""
    usage = read_process(pid)
    return None if usage is None else [pid, usage.started_ticks]


@cache
def recorder() -> Recorder:
    """The recorder of this process."""
    return Recorder(Path(os.environ[FOLDER_VARIABLE]))


os.register_at_fork(after_in_child=recorder.cache_clear)

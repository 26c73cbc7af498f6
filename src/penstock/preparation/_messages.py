"""What a worker process and its parent say to each other, and how an exception travels.

Pipes only, nothing in `/dev/shm`. What crosses is pickled, between a parent and the child it started.
"""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass
from typing import Any

from penstock.preparation._progress import Counts
from penstock.preparation._record import TaskRecord


@dataclass(frozen=True, slots=True)
class Open:
    """Parent: tasks of this pickled job come next."""

    job: bytes
    main: dict[str, Any] | None
    """How to import the user's script, when the job holds functions of it."""


@dataclass(frozen=True, slots=True)
class Run:
    """Parent: do this task."""

    task: Any


@dataclass(frozen=True, slots=True)
class Opened:
    """Worker: the job is open."""


@dataclass(frozen=True, slots=True)
class Told:
    """Worker: this was done for a task since the last message."""

    key: str
    counts: Counts


@dataclass(frozen=True, slots=True)
class Freed:
    """Worker: the task's shards are written, and while they are made safe there is time for another."""


@dataclass(frozen=True, slots=True)
class Done:
    """Worker: the task is finished."""

    record: TaskRecord


@dataclass(frozen=True, slots=True)
class Failed:
    """Worker: the task, or opening the job, raised this."""

    error: bytes
    text: str
    """The traceback, for people."""


def pack_error(error: BaseException) -> Failed:
    """The exception as a message; one that cannot be pickled becomes a RuntimeError that says what it was."""
    text = "".join(traceback.format_exception(error))
    try:
        packed = pickle.dumps(error)
        pickle.loads(packed)  # noqa: S301 our own bytes: some exceptions pickle and do not come back
    except Exception:  # noqa: BLE001 anything may go wrong in a foreign class
        packed = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return Failed(packed, text)


def unpack_error(failed: Failed, where: str) -> BaseException:
    """The exception that a worker packed, with its traceback as a note."""
    error: BaseException = pickle.loads(failed.error)  # noqa: S301 written by our own child
    error.add_note(f"Raised in {where}:\n{failed.text}")
    return error

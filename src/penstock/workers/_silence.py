"""What to report about a worker that keeps its owner waiting: which, doing what, for how long, and in what state.

A worker that is stopped, or waits for a lock that is never released, sends neither an error nor an end of file. So a
long wait is reported after half a minute and each time it has doubled: soon enough to notice, too seldom to fill a log.
"""

from __future__ import annotations

import time
from pathlib import Path

FIRST_REPORT_SECONDS = 30.0
_STATES = {
    "R": "it is running",
    "S": "it is asleep, waiting for a lock, a network or a process of its own",
    "D": "it is waiting for a disk or a network file system",
    "T": "it is stopped; `kill -CONT {pid}` lets it go on",
    "t": "a debugger has stopped it",
}
"""By the kernel's letter for the state; see proc_pid_stat(5)."""


class Patience:
    """When to report a long wait."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin the next wait."""
        self._begin = time.monotonic()
        self._next_report = FIRST_REPORT_SECONDS

    @property
    def seconds(self) -> float:
        """How long this wait has lasted."""
        return time.monotonic() - self._begin

    def is_report_due(self) -> bool:
        """Whether to report now; the next report is due when the wait is twice as long."""
        seconds = self.seconds
        if seconds < self._next_report:
            return False
        self._next_report = 2 * seconds
        return True


def describe_silence(worker: str, pid: int | None, doing: str, seconds: float) -> str:
    """What a silent worker has been doing, for how long, and what state its process is in."""
    wait = f"{worker}{'' if pid is None else f' (pid {pid})'} has been {doing} for {seconds:.0f} s"
    state = "" if pid is None else _describe_state(pid)
    return f"{wait}; {state}." if state else f"{wait}."


def _describe_state(pid: int) -> str:
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):  # no /proc, or it has just ended
        return ""
    found = _STATES.get(letter, "").format(pid=pid)
    return f"{found} (`py-spy dump --pid {pid}` shows where)" if letter in "RS" else found

"""What is said about a worker that is waited for: which, what it is doing, for how long, and whether it can go on.

A worker that is stopped, or waits for a lock that nobody opens, sends neither an error nor an end of file. So who
waits for long says so, after half a minute and whenever the time has doubled: soon enough to be found, too seldom to
fill a log.
"""

from __future__ import annotations

import time
from pathlib import Path

FIRST_WORD_SECONDS = 30.0
_STATES = {
    "R": "it is running",
    "S": "it is asleep, waiting for a lock, a network or a process of its own",
    "D": "it waits for a disk or a network file system",
    "T": "it is stopped, and goes on after `kill -CONT {pid}`",
    "t": "a debugger has stopped it",
}
"""By the letter that the kernel has for them; see proc_pid_stat(5)."""


class Patience:
    """When to say that something has been waited for."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """What was waited for has come; the next wait begins."""
        self._begin = time.monotonic()
        self._next_word = FIRST_WORD_SECONDS

    @property
    def seconds(self) -> float:
        """How long this wait has been."""
        return time.monotonic() - self._begin

    def is_at_an_end(self) -> bool:
        """Whether a word is due; after it the next one is when the wait is twice as long."""
        seconds = self.seconds
        if seconds < self._next_word:
            return False
        self._next_word = 2 * seconds
        return True


def describe_silence(worker: str, pid: int | None, doing: str, seconds: float) -> str:
    """What a silent worker has been doing, for how long, and what state its process is in."""
    told = f"{worker}{'' if pid is None else f' (pid {pid})'} has been {doing} for {seconds:.0f} s"
    state = "" if pid is None else _describe_state(pid)
    return f"{told}; {state}." if state else f"{told}."


def _describe_state(pid: int) -> str:
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):  # no /proc, or it has just ended
        return ""
    found = _STATES.get(letter, "").format(pid=pid)
    return f"{found} (`py-spy dump --pid {pid}` shows where)" if letter in "RS" else found

"""How workers report trouble: an error as it was raised, a death as a diagnosis, a long silence as a warning.

A worker that is stopped, or waits for a lock that is never released, sends neither an error nor an end of file. So a
long wait is reported after half a minute and each time it has doubled: soon enough to notice, too seldom to fill a log.
"""

from __future__ import annotations

import pickle
import signal
import time
import traceback
from pathlib import Path
from typing import NamedTuple

from penstock.machine import MemoryLimit, fullest_memory

_MEMORY = Path("/proc/meminfo")
_CRASHES = frozenset({-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGILL, -signal.SIGFPE})
_LACKS = frozenset({-signal.SIGKILL, -signal.SIGBUS, None})
"""Exit codes of processes that may have run out of memory."""
FIRST_REPORT_SECONDS = 30.0
_STATES = {
    "R": "it is running",
    "S": "it is asleep, waiting for a lock, a network or a process of its own",
    "D": "it is waiting for a disk or a network file system",
    "T": "it is stopped; `kill -CONT {pid}` lets it go on",
    "t": "a debugger has stopped it",
}
"""By the kernel's letter for the state; see proc_pid_stat(5)."""


class RemoteTraceback(Exception):
    """Where an error happened in a worker process."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


class SentError(NamedTuple):
    """An error on its way from a worker to its owner."""

    pickled: bytes | None
    """The error; only its type if the error does not survive pickling; None if neither does."""
    message: str
    text: str
    """The traceback."""

    @classmethod
    def pack(cls, error: BaseException) -> SentError:
        """Pack as much of an error as can be pickled."""
        text = "".join(traceback.format_exception(error))
        for form in (error, type(error)):
            try:
                pickled = pickle.dumps(form)
                pickle.loads(pickled)  # noqa: S301 - our own bytes: some errors can be pickled but not unpickled
                return cls(pickled, str(error), text)
            except Exception:  # noqa: BLE001, S112 - try with less of it
                continue
        return cls(None, f"{type(error).__name__}: {error}", text)

    def rebuild(self, note: str) -> BaseException:
        """The original error, with its traceback as the cause; if it could not be pickled, one of its type."""
        error: BaseException
        try:
            found = RuntimeError if self.pickled is None else pickle.loads(self.pickled)  # noqa: S301 - from our worker
            error = found if isinstance(found, BaseException) else found.__new__(found, self.message)
        except Exception:  # noqa: BLE001 - a class that only the worker can import or construct
            error = RuntimeError(self.text.strip().splitlines()[-1])
        error.__cause__ = RemoteTraceback(self.text)
        error.add_note(note)
        return error


def describe_ending(code: int | None) -> str:
    """How a process ended, from its exit code: minus the signal's number, or None if unknown."""
    if code is None:
        return "ended"
    return f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with code {code}"


def describe_death(worker: str, pid: int | None, code: int | None, doing: str, *, num_before: int = 0) -> str:
    """How a worker died, what it was doing, and how much memory is left if that may be why; the caller adds advice."""
    which = "" if pid is None else f" (pid {pid})"
    guess = " (out of memory?)" if code == -signal.SIGKILL else ""
    before = f", like the {num_before} before it" if num_before else ""
    memory = _describe_memory() if may_lack_memory(code) else ""
    return f"{worker}{which} {describe_ending(code)} while {doing}{guess}{before}. {memory}"


def is_crash(code: int | None) -> bool:
    """Whether compiled code crashed, so that only a trace of the process shows where."""
    return code in _CRASHES


def may_lack_memory(code: int | None) -> bool:
    """Whether a process with this exit code may have run out of memory."""
    return code in _LACKS


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _describe_memory() -> str:
    """How full the memory is: that of the worker's control group or of the machine, whichever is fuller."""
    machine, group = _machine_memory(), fullest_memory()
    shares = [limit.used_bytes / limit.limit_bytes for limit in (machine, group) if limit is not None]
    if group is None or (machine is not None and shares[0] > shares[1]):
        return "" if machine is None else f"System memory is {100 * shares[0]:.0f} % used. "
    used, limit = (f"{num_bytes / 1e9:.1f}" for num_bytes in (group.used_bytes, group.limit_bytes))
    killed = f", and {group.num_killed} of its processes were killed for running out" if group.num_killed else ""
    return f"The control group's memory is {100 * shares[-1]:.0f} % used ({used} of {limit} GB){killed}. "


def _machine_memory() -> MemoryLimit | None:
    try:
        fields = dict(line.split(":") for line in _MEMORY.read_text().splitlines())
        total, available = (int(fields[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    except (OSError, ValueError, KeyError):  # the rest of the message is still worth having
        return None
    return MemoryLimit(total, total - available)


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

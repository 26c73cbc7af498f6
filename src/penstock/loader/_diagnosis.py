"""What is said when a worker process fails: its error as it was, or how it died."""

from __future__ import annotations

import pickle
import signal
from pathlib import Path
from typing import Any

from penstock.loader._starting import Started


class RemoteTraceback(Exception):
    """Where an error happened in a worker process."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


def rebuild_error(pickled: bytes | None, message: str, text: str, *, note: str) -> BaseException:
    """The worker's error as it was, with its traceback as the cause; if it cannot travel, one of its type."""
    error: BaseException
    try:
        found = RuntimeError if pickled is None else pickle.loads(pickled)  # noqa: S301 - from a worker of this process
        error = found if isinstance(found, BaseException) else found.__new__(found, message)
    except Exception:  # noqa: BLE001 - a class that only the worker can import, or that only it can make
        error = RuntimeError(text.strip().splitlines()[-1])
    error.__cause__ = RemoteTraceback(text)
    error.add_note(note)
    return error


def diagnose_death(started: Started, code: int | None, item: Any, num_before: int = 0) -> str:
    """How a worker died and what it was doing, with what is likely to help."""
    if code is not None and code < 0:
        how = f"was killed by {_signal_name(-code)}"
    else:
        how = "ended" if code is None else f"exited with code {code}"
    pid = "" if started.pid is None else f" (pid {started.pid})"
    guess = " (out of memory?)" if code == -signal.SIGKILL else ""
    before = f", as did the {num_before} before it" if num_before else ""
    return (
        f"Worker {started.number}{pid} {how} while computing {item}{guess}{before}. "
        f"{_memory_used()}Lower num_workers or prefetch, or see what this batch needs."
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _memory_used() -> str:
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        total, available = (int(fields[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    except (OSError, ValueError, KeyError):  # what can be said of the death is worth more
        return ""
    return f"System memory is {100 * (1 - available / total):.0f} % used. "

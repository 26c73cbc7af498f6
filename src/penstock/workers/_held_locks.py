"""Whether forked workers hold a `multiprocessing` lock, and so must not be killed just now.

A fork has every lock that its owner ever made, and one that dies holding a lock leaves it locked for ever. Most never
touch them: the lock may just be that of a tqdm progress bar. So forks are stopped for a moment, in which they cannot
take any, and the owner looks at its locks: if each has its initial value, nobody holds one. Items in a queue count as
held, too: like a semaphore, a queue counts down from its maximum size.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable
from multiprocessing import util
from typing import Any

_STOP_SECONDS = 0.1


def find_locks() -> list[Any]:
    """The locks of this process, which its forks share; `multiprocessing` registers them for its own forks."""
    synchronize = sys.modules.get("multiprocessing.synchronize")
    registry = getattr(util, "_afterfork_registry", {})
    if synchronize is None:
        return []
    return [lock for lock in list(registry.values()) if isinstance(lock, synchronize.SemLock)]


def stop_without_locks(pids: Iterable[int]) -> bool:
    """Whether none of these children holds a lock; if so they stay stopped, to be killed, otherwise they go on."""
    pids = list(pids)
    _send(signal.SIGSTOP, pids)
    deadline = time.monotonic() + _STOP_SECONDS
    if all(_has_stopped(pid, deadline) for pid in pids) and all(map(_is_free, find_locks())):
        return True
    _send(signal.SIGCONT, pids)
    return False


def _is_free(lock: Any) -> bool:
    """Whether nobody holds a lock, or only this process."""
    counter = lock._semlock
    return bool(counter._get_value() == counter.maxvalue or counter._is_mine())


def _has_stopped(pid: int, deadline: float) -> bool:
    """Whether a child stops or ends before the deadline: one that waits for a disk does neither."""
    while time.monotonic() < deadline:
        try:
            if os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                return True
        except ChildProcessError:  # somebody else has waited for it
            return True
        time.sleep(0.001)
    return False


def _send(number: signal.Signals, pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

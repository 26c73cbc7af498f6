"""A worker process: opens a job, does the tasks it is sent, one after another, and dies with its parent.

It is started as `python -c 'from penstock.preparation._worker import main; main(…)'`, so it imports the
user's script only when a function of it is in the job. It holds two ends: a connection, and a
life-line whose other end only the parent has. A thread waits on the life-line and ends the process at
once when the parent is gone. The parent-death signal does the same without waiting for the GIL; the
thread that would trigger it early is the one that waits in `prepare`, so it cannot end first.

While one task's shards are synced, by a thread of their own, the next task is at work.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import queue
import signal
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from penstock.preparation._messages import Done, Freed, Open, Opened, Run, Told, pack_error
from penstock.preparation._progress import Counts
from penstock.preparation._stages import Runner, Tell, Written

_PR_SET_PDEATHSIG = 1
_ORPHANED = 3


def main(connection_descriptor: int, lifeline_descriptor: int, parent: int) -> None:
    """Work until the parent hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    _die_with(parent, lifeline_descriptor)
    connection = Connection(connection_descriptor)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        _serve(connection)
    os._exit(0)  # nothing to flush, and libraries' threads must not keep the process


class _Line:
    """The connection, for two threads."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: Any) -> None:
        with self._lock:
            self._connection.send(message)


class _Finisher:
    """Makes written tasks safe, one at a time, while the next one is at work."""

    def __init__(self, line: _Line) -> None:
        self._line = line
        self._waiting: queue.Queue[Written] = queue.Queue(maxsize=1)
        threading.Thread(target=self._work, name="penstock-finisher", daemon=True).start()

    def take(self, written: Written) -> None:
        """Take over a task; a disk that cannot keep up is waited for, and that is writing time."""
        begin = time.perf_counter()
        written.record.counts.write_seconds += self._wait() - begin
        self._waiting.put(written)

    def _wait(self) -> float:
        self._waiting.join()
        return time.perf_counter()

    def _work(self) -> None:
        while True:
            written = self._waiting.get()
            try:
                self._line.send(Done(written.finish()))
            except (BrokenPipeError, ConnectionResetError):
                return
            except BaseException as error:  # noqa: BLE001 whatever it was, the parent raises it
                self._line.send(pack_error(error))
            finally:
                self._waiting.task_done()


def _serve(connection: Connection) -> None:
    runner: Runner[Any] | None = None
    line = _Line(connection)
    finisher = _Finisher(line)
    while True:
        message = connection.recv()
        try:
            if isinstance(message, Open):
                runner = _open(message)
                line.send(Opened())
            elif isinstance(message, Run):
                assert runner is not None
                finisher.take(runner.run(message.task, _teller(line, message.task.key)))
                line.send(Freed())
        except (BrokenPipeError, ConnectionResetError):
            raise
        except BaseException as error:  # noqa: BLE001 whatever it was, the parent raises it
            line.send(pack_error(error))


def _open(message: Open) -> Runner[Any]:
    if message.main is not None:
        from multiprocessing import spawn

        spawn.prepare(message.main)
    runner: Runner[Any] = pickle.loads(message.job).open()  # noqa: S301 sent by our own parent
    return runner


def _teller(line: _Line, key: str) -> Tell:
    def tell(counts: Counts) -> None:
        line.send(Told(key, counts))

    return tell


def _die_with(parent: int, lifeline: int) -> None:
    def watch() -> None:
        with contextlib.suppress(OSError):
            os.read(lifeline, 1)
        os._exit(_ORPHANED)

    threading.Thread(target=watch, name="penstock-lifeline", daemon=True).start()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(_ORPHANED)

"""The workers of one owner: started the same way, polled together, ended together.

**Locks.** A worker that dies holding a `multiprocessing` lock leaves it locked for ever, and a fork has every lock that
its owner ever made. Most never touch them: the lock may just be that of a tqdm progress bar. So forks are stopped for a
moment, in which they cannot take any, and the owner looks at its locks: if each has its initial value, nobody holds
one. Items in a queue count as held, too: like a semaphore, a queue counts down from its maximum size.
"""

import contextlib
import os
import select
import signal
import sys
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from multiprocessing import util
from typing import Any

from penstock.workers._channel import abandon_in_forks
from penstock.workers._fork_servers import ForkServerStarter
from penstock.workers._program import SentProgram
from penstock.workers._script import check_not_importing_script
from penstock.workers._starting import (
    ForkStarter,
    SpawnStarter,
    Starter,
    StartMethod,
    WorkerProcess,
    occupy_standard_descriptors,
)
from penstock.workers._worker import Program

_FINISH_SECONDS = 5.0
"""How long workers may take to finish; the same as in torch's loader."""
_LOOK_SECONDS = 0.1
"""How often forked workers are checked meanwhile."""
_STOP_SECONDS = 0.1


class Crew:
    """Worker processes that run one program, identified by their numbers.

    There is no thread behind it: messages are read by the caller that waits for them, and a death shows up there at
    once as an end of file. A crew that is garbage collected takes its workers with it.

    Args:
        environment: Variables that workers get in addition to those of this process.
        warm_up: What a fork server, or this process, does before it forks workers: a function in a module.
        otherwise: The end of the error's advice if the program cannot be sent to workers: what else the user can do.

    Raises:
        TypeError: the program cannot be sent to workers.
        RuntimeError: this process is a worker that is importing the user's script.
    """

    def __init__(
        self,
        program: Program,
        start_method: StartMethod,
        *,
        environment: Mapping[str, str],
        warm_up: Callable[[], None],
        otherwise: str,
    ) -> None:
        check_not_importing_script()
        occupy_standard_descriptors()
        self._sent = sent = None if start_method == "fork" else SentProgram(program, otherwise=otherwise)
        reader, self._life_line = os.pipe()
        self._starter: Starter
        if sent is None:
            warm_up()
            self._starter = ForkStarter(reader, environment, program)
        elif start_method == "spawn":
            self._starter = SpawnStarter(reader, environment, sent)
        else:
            self._starter = ForkServerStarter(reader, environment, sent, warm_up)
        self._end = weakref.finalize(self, _end, self._life_line, reader, self._starter)
        self._workers: list[WorkerProcess] = []
        self._listening: tuple[dict[int, WorkerProcess], select.poll] | None = None
        """(workers by descriptor, poller for all of them); None when the workers have changed."""
        self._next_number = 0
        self.is_closed = False
        abandon_in_forks(self)

    def start(self) -> WorkerProcess:
        """Begin to start a worker; messages to it wait until it is running."""
        number, self._next_number = self._next_number, self._next_number + 1
        worker = self._starter.start(number)
        self._workers.append(worker)
        self._listening = None
        return worker

    def wait(self, seconds: float | None = None) -> list[WorkerProcess]:
        """The workers that have sent something or have died, waiting at most this long for the first."""
        workers, poller = self._listening or self._listen()
        ready = poller.poll(None if seconds is None else seconds * 1000)
        return [workers[descriptor] for descriptor, _ in ready]

    def descriptors(self) -> Collection[int]:
        """For an event loop: what to wait for in place of `wait`. Another object whenever the workers have changed."""
        return (self._listening or self._listen())[0]

    def find_pid(self, worker: WorkerProcess) -> int | None:
        """The process id of a worker; None while it is being started."""
        return self._starter.find_pid(worker)

    def release(self, worker: WorkerProcess) -> None:
        """Let go of a worker that has nothing left to do: it sees the end of its channel, and exits."""
        self._workers.remove(worker)
        self._listening = None
        worker.channel.close()

    def remove_dead(self, worker: WorkerProcess) -> int | None:
        """Take a dead worker out of the crew; return its exit code for `describe_death`, if known.

        If it is alive, because a function that it runs closed its channel, it is killed.
        """
        self._workers.remove(worker)
        self._listening = None
        code = self._starter.exit_code(worker)
        worker.channel.close()
        return code

    def close(self) -> None:
        """Cut the life-line: every process ends at once, whatever it is doing. Idempotent, from any thread.

        If workers have `multiprocessing` locks, one killed while holding a lock would leave it locked for ever. So they
        may first finish what they are doing, for as long as torch allows its own. Forked workers are checked: if none
        holds a lock, they end at once.
        """
        # A crew in a garbage cycle may be closed by its owner's `__del__` after the collector has ended its workers and
        # finalised their channels: there is nothing left to wait for.
        if not self.is_closed and self._end.alive and self._shares_locks():
            self._let_finish()
        self._let_go()
        self._end()

    def abandon(self) -> None:
        """In a forked child: let go of the parent's workers without ending them."""
        self._let_go()
        if self._end.detach() is not None:
            os.close(self._life_line)

    def _listen(self) -> tuple[dict[int, WorkerProcess], select.poll]:
        workers = {worker.channel.fileno(): worker for worker in self._workers}
        poller = select.poll()  # `select` refuses descriptors above 1,023
        for descriptor in workers:
            poller.register(descriptor, select.POLLIN)
        self._listening = workers, poller
        return self._listening

    def _shares_locks(self) -> bool:
        return bool(find_locks()) if self._sent is None else self._sent.has_locks

    def _let_finish(self) -> None:
        """Have workers exit by themselves, each after the item it is computing."""
        self.is_closed = True
        deadline = time.monotonic() + _FINISH_SECONDS
        for worker in self._workers:
            worker.channel.finish()
        while self._workers and (seconds := deadline - time.monotonic()) > 0:
            if self._sent is None:
                if stop_without_locks(worker.pid for worker in self._workers if worker.pid is not None):
                    return
                seconds = min(seconds, _LOOK_SECONDS)
            for worker in self.wait(seconds):
                if worker.channel.has_ended():
                    self.release(worker)

    def _let_go(self) -> None:
        self.is_closed = True
        for worker in self._workers:
            worker.channel.close()
        self._workers.clear()


def _end(life_line: int, reader: int, starter: Starter) -> None:
    os.close(life_line)
    os.close(reader)
    starter.close()


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

"""The workers of one owner: started one way, listened to together, ended together."""

from __future__ import annotations

import os
import select
import time
import weakref
from collections.abc import Callable, Mapping

from penstock.workers._forks import abandon_in_forks
from penstock.workers._held_locks import find_locks, stop_without_locks
from penstock.workers._packed import check_not_importing_script
from penstock.workers._parcel import Parcel
from penstock.workers._server_starter import ForkServerStarter
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
"""Of torch's loader, too."""
_LOOK_SECONDS = 0.1
"""How often forked workers are looked at meanwhile."""


class Crew:
    """Worker processes that run one program, each told apart by its number.

    There is no thread behind it: messages are read by whoever waits for them, and a death is an end of file
    there, seen at once. A crew that is forgotten takes its workers along.

    Args:
        environment: Variables that workers get beside those of this process.
        warm_up: What a fork server does before it forks: a function of a module.
        otherwise: What else can be done when the program cannot be sent to workers, to end the error's advice.

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
        self._parcel = parcel = None if start_method == "fork" else Parcel(program, otherwise=otherwise)
        reader, self._life_line = os.pipe()
        self._starter: Starter
        if parcel is None:
            self._starter = ForkStarter(reader, environment, program)
        elif start_method == "spawn":
            self._starter = SpawnStarter(reader, environment, parcel)
        else:
            self._starter = ForkServerStarter(reader, environment, parcel, warm_up)
        self._end = weakref.finalize(self, _end, self._life_line, reader, self._starter)
        self._workers: list[WorkerProcess] = []
        self._listening: tuple[dict[int, WorkerProcess], select.poll] | None = None
        """(workers by descriptor, what waits for any of them); None when the workers have changed."""
        self._next_number = 0
        self._waker: int | None = None
        self.is_closed = False
        abandon_in_forks(self)

    def start(self) -> WorkerProcess:
        """Begin to start a worker; what it is sent waits until it is there."""
        number, self._next_number = self._next_number, self._next_number + 1
        worker = self._starter.start(number)
        self._workers.append(worker)
        self._listening = None
        return worker

    def wait(self, seconds: float | None = None) -> list[WorkerProcess]:
        """The workers that have sent something or have died, waiting at most so long for the first."""
        workers, poller = self._listening or self._listen()
        ready = poller.poll(None if seconds is None else seconds * 1000)
        return [workers[descriptor] for descriptor, _ in ready if descriptor != self._waker]

    def wake_on(self, descriptor: int) -> None:
        """Let `wait` return also when there is something to read from this descriptor, which the owner then reads."""
        self._waker, self._listening = descriptor, None

    def find_pid(self, worker: WorkerProcess) -> int | None:
        """The process id of a worker; None while it is being started."""
        return self._starter.find_pid(worker)

    def release(self, worker: WorkerProcess) -> None:
        """Let a worker go that has nothing left to do: it sees the end of its channel, and exits."""
        self._workers.remove(worker)
        self._listening = None
        worker.channel.close()

    def bury(self, worker: WorkerProcess) -> int | None:
        """Take a dead worker out of the crew; return how it ended, if that is known, as `describe_death` takes it.

        One whose channel was closed by a function that it runs is killed.
        """
        self._workers.remove(worker)
        self._listening = None
        code = self._starter.exit_code(worker)
        worker.channel.close()
        return code

    def close(self) -> None:
        """Cut the life-line: every process ends at once, whatever it is doing. Any thread may, twice is as good.

        If workers have locks of `multiprocessing`, one may hold one, and nobody else would ever get it: then they may
        first finish what they are doing, for as long as torch's may. Forked ones are looked at: where none holds a
        lock, they end at once.
        """
        if not self.is_closed and (bool(find_locks()) if self._parcel is None else self._parcel.has_locks):
            self._let_finish()
        self._let_go()
        self._end()

    def abandon(self) -> None:
        """In a forked child: let go of what belongs to the parent, without ending it."""
        self._let_go()
        if self._end.detach() is not None:
            os.close(self._life_line)

    def _listen(self) -> tuple[dict[int, WorkerProcess], select.poll]:
        workers = {worker.channel.fileno(): worker for worker in self._workers}
        poller = select.poll()  # `select` refuses descriptors from 1,024 on
        for descriptor in workers:
            poller.register(descriptor, select.POLLIN)
        if self._waker is not None:
            poller.register(self._waker, select.POLLIN)
        self._listening = workers, poller
        return self._listening

    def _let_finish(self) -> None:
        """Have workers exit by themselves, after the item that each is computing."""
        self.is_closed = True
        deadline = time.monotonic() + _FINISH_SECONDS
        for worker in self._workers:
            worker.channel.finish()
        while self._workers and (seconds := deadline - time.monotonic()) > 0:
            if self._parcel is None:
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

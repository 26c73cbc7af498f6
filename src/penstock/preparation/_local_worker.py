"""Tasks in a worker process of this machine: the other end of `_local.py`."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from dataclasses import dataclass
from typing import Any

from penstock.preparation._attempt import Attempt
from penstock.preparation._jobs import Done, Opened, Runner, TaskFailed, Tell, Told
from penstock.preparation._progress import Counts
from penstock.workers import Channel, Packed, PackedError, guard_life_line


@dataclass(frozen=True, slots=True)
class Freed:
    """From a worker: the task's shards are written, and while they are synced it can do another."""


@dataclass(frozen=True, slots=True)
class RunTasks:
    """The worker's program."""

    def run(self, channel: Channel, life_line: int) -> None:
        """Open the jobs and do the tasks that it is sent, until the channel ends."""
        guard_life_line(life_line)
        runner: Runner[Any] | None = None
        finisher = _Finisher(channel)
        while True:
            message, _ = channel.receive()
            answer: Opened | Freed | TaskFailed
            try:
                if isinstance(message, Packed):
                    runner = message.load().open()
                    answer = Opened()
                else:
                    assert runner is not None
                    finisher.take(runner.run(message, _teller(channel, message.key)))
                    answer = Freed()
            except BaseException as error:  # noqa: BLE001 whatever it is, the parent raises it
                answer = TaskFailed(PackedError.pack(error))
            channel.send(answer)


class _Finisher:
    """Syncs finished tasks, one at a time, while the next one is running."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._waiting: queue.Queue[Attempt] = queue.Queue(maxsize=1)
        threading.Thread(target=self._work, name="penstock-finisher", daemon=True).start()

    def take(self, attempt: Attempt) -> None:
        """Take over a task; waiting for a disk that cannot keep up counts as writing time."""
        begin = time.perf_counter()
        self._waiting.join()
        attempt.record.counts.write_seconds += time.perf_counter() - begin
        self._waiting.put(attempt)

    def _work(self) -> None:
        while True:
            attempt = self._waiting.get()
            answer: Done | TaskFailed
            try:
                answer = Done(attempt.finish())
            except BaseException as error:  # noqa: BLE001 whatever it was, the parent raises it
                answer = TaskFailed(PackedError.pack(error))
            with contextlib.suppress(ConnectionError):  # the parent is gone, and this process soon will be
                self._channel.send(answer)
            self._waiting.task_done()


def _teller(channel: Channel, key: str) -> Tell:
    def tell(counts: Counts) -> None:
        channel.send(Told(key, counts))

    return tell

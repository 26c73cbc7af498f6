"""The fork server: imports what workers need once, then forks one in milliseconds whenever asked.

It starts as a fresh interpreter, so it has no threads, locks or open files of the trainer, and
does not import the user's script. It tells the trainer how each of its workers ended.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterator
from typing import NoReturn

import numpy as np

from penstock.loader._channel import Channel
from penstock.loader._life_line import hold_life_line
from penstock.loader._worker import leave_signals_to_trainer, run_worker
from penstock.plan import from_arrays
from penstock.schema import Ragged

_REAP_SECONDS = 0.05


def serve(descriptor: int, life_line: int) -> NoReturn:
    """Serve the trainer at the other end of a channel."""
    leave_signals_to_trainer()
    channel = Channel.of_descriptor(descriptor)
    _warm_up()
    numbers: dict[int, int] = {}
    news: deque[tuple[str, int, int]] = deque()
    try:
        while True:
            if channel.has_news(_REAP_SECONDS):
                news.append(_fork(channel, life_line, numbers))
            news.extend(_reap(numbers))
            _tell(channel, news)
    except (EOFError, ConnectionError):
        os._exit(0)


def spawned(descriptor: int, life_line: int) -> NoReturn:
    """A worker in an interpreter of its own."""
    run_worker(Channel.of_descriptor(descriptor), life_line)


def _warm_up() -> None:
    """Load the compiled kernels by using them: half a second that each worker would spend otherwise."""
    tokens = Ragged(np.arange(8, dtype=np.uint16), np.array([0, 3, 8]))
    from_arrays({"tokens": tokens}).shuffle(seed=0).window(4).batch(1).read(0)


def _fork(channel: Channel, life_line: int, numbers: dict[int, int]) -> tuple[str, int, int]:
    (number,), (descriptor,) = channel.receive()
    pid = os.fork()
    if pid == 0:
        channel.close()
        run_worker(Channel.of_descriptor(descriptor), hold_life_line(life_line))
    os.close(descriptor)
    numbers[pid] = number
    return "started", number, pid


def _reap(numbers: dict[int, int]) -> Iterator[tuple[str, int, int]]:
    while numbers:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        yield "ended", numbers.pop(pid), os.waitstatus_to_exitcode(status)


def _tell(channel: Channel, news: deque[tuple[str, int, int]]) -> None:
    """Say what the trainer has room for; it reads only when it starts a worker, or misses one."""
    with contextlib.suppress(BlockingIOError):
        while news:
            channel.send(news[0], is_patient=False)
            news.popleft()

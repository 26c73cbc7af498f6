"""The fork server: imports what workers need once, then forks one in milliseconds whenever asked.

It starts as a fresh interpreter, so it has no threads, locks or open files of the trainer, and
does not import the user's script. It tells the trainer how each of its workers ended.
"""

from __future__ import annotations

import os
import select
import sys
from typing import NoReturn

from penstock.loader._channel import Channel
from penstock.loader._worker import run_worker

_REAP_SECONDS = 0.05


def main() -> None:
    """Serve the trainer at the other end of the descriptors named on the command line."""
    channel, life_line = Channel.of_descriptor(int(sys.argv[1])), int(sys.argv[2])
    _import_kernels()
    while True:
        ready, _, _ = select.select([channel.fileno(), life_line], [], [], _REAP_SECONDS)
        if life_line in ready:  # see NOTE [the life-line]
            os._exit(0)
        _reap(channel)
        if not ready:
            continue
        try:
            (number,), descriptors = channel.receive()
        except EOFError:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            os.close(channel.fileno())
            run_worker(Channel.of_descriptor(descriptors[0]), life_line)
        for descriptor in descriptors:
            os.close(descriptor)
        channel.send(("started", number, pid))


def spawned() -> NoReturn:
    """A worker in an interpreter of its own."""
    run_worker(Channel.of_descriptor(int(sys.argv[1])), int(sys.argv[2]))
    raise AssertionError("run_worker does not return")


def _import_kernels() -> None:
    from penstock.plan import _compose
    from penstock.shards import _table

    _compose.kernels()
    _table.kernels()


def _reap(channel: Channel) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        channel.send(("ended", pid, os.waitstatus_to_exitcode(status)))

"""Start workers through a fork server, and learn from it how they ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from penstock.workers._channel import Channel
from penstock.workers._parcel import Parcel
from penstock.workers._running_servers import RunningServer, ServerLease
from penstock.workers._starting import END_SECONDS, EXIT_SECONDS, WorkerProcess


class ForkServerStarter:
    """Workers come from a fork server, which is leased with the first of them."""

    def __init__(
        self, life_line: int, environment: Mapping[str, str], program: Parcel, warm_up: Callable[[], None]
    ) -> None:
        self._life_line, self._environment, self._program = life_line, environment, program
        self._warm_up = warm_up
        self._lease: ServerLease | None = None
        self._forked: dict[int, tuple[RunningServer, int]] = {}
        """Which server forked each worker, and its number there."""

    def start(self, number: int) -> WorkerProcess:
        """Ask the server for a fork; if the server was killed, start another."""
        ours, theirs = Channel.pair()
        try:
            self._forked[number] = self._fork(theirs)
        except ConnectionError:
            assert self._lease is not None
            self._lease.report_dead()
            self._lease.close()
            self._lease = None
            self._forked[number] = self._fork(theirs)
        theirs.close()
        self._program.send(ours)
        return WorkerProcess(number, ours)

    def find_pid(self, worker: WorkerProcess) -> int | None:
        """What the server said."""
        server, number = self._forked[worker.number]
        return server.find_pid(number)

    def exit_code(self, worker: WorkerProcess) -> int | None:
        """What the server saw."""
        server, number = self._forked.pop(worker.number)
        if not server.wait_for_end(number, EXIT_SECONDS):
            server.kill(number)
            server.wait_for_end(number, EXIT_SECONDS)
        worker.pid, code = server.forget(number)
        return code

    def close(self) -> None:
        """Wait for the workers if others still use the server, otherwise for the server, which ends after them."""
        deadline = time.monotonic() + END_SECONDS
        for server, number in self._forked.values():
            if server.is_shared:
                server.wait_for_end(number, deadline - time.monotonic())
            server.forget(number)
        self._forked.clear()
        if self._lease is not None:
            self._lease.close()
        self._program.close()

    def _fork(self, channel: Channel) -> tuple[RunningServer, int]:
        if self._lease is None:
            self._lease = ServerLease(self._environment, self._warm_up)
        server = self._lease.server
        return server, server.fork(channel, self._life_line)

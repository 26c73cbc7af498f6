"""Start servers of a plan: one on this machine (`penstock.serve`), or many on a Ray cluster.

    RayServers                              actors, spread over the cluster
    place N of them ────────────────────►   a `Server` each, on a port of its machine
    "where are you?", every second ◄────►   host:port
    a file with the addresses ──────────►   DataLoader(plan, remote="servers.txt") looks into it every two seconds

Ray does the scheduling: it starts a lost actor again, on the same machine or on another. All that is watched here is
the address it then has. What a server itself needs (aiohttp) is imported when one starts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from penstock.errors import MissingExtra, ServiceError
from penstock.filesystem import put_in_place
from penstock.plan import Plan
from penstock.service._settings import Security, join_address, split_address
from penstock.workers import Cluster, StartMethod

if TYPE_CHECKING:
    from penstock.service._server import Server

logger = logging.getLogger(__name__)
_TICK_SECONDS = 1.0
_START_SECONDS = 120.0
_WILDCARDS = ("", "0.0.0.0", "::")  # noqa: S104 - recognised, not bound to


def serve(
    plan: Plan,
    bind: str = "127.0.0.1:8815",
    *,
    num_workers: int | None = None,
    start_method: StartMethod = "forkserver",
    security: Security | None = None,
    window_bytes: int = 256 << 20,
) -> Server:
    """Serve a plan's batches from this machine, until the returned server is closed.

    Args:
        plan: What to serve; it ends with `batch()`.
        bind: Host and port to listen on; port 0 takes a free one.
        num_workers: Worker processes; by default as many as the processors this job may use.
        start_method: How worker processes start.
        security: TLS and tokens, without which a server listens on loopback only.
        window_bytes: How many bytes of sent answers are kept for other ranks and jobs that ask for the same.

    Raises:
        ValueError: the address can be reached from other machines, and nothing keeps strangers out.

    >>> import numpy as np, penstock
    >>> plan = penstock.from_arrays({"x": np.arange(6)}).batch(2)
    >>> with serve(plan, "127.0.0.1:0", num_workers=1) as server:
    ...     loader = penstock.DataLoader(plan, remote=[server.address])
    ...     [batch["x"].tolist() for batch in loader]
    [[0, 1], [2, 3], [4, 5]]
    """
    try:
        from penstock.service._server import Server
    except ImportError as error:
        raise MissingExtra(f"penstock.serve needs {error.name}: pip install 'penstock-data[service]'") from error
    return Server(
        plan, bind, num_workers=num_workers, start_method=start_method, security=security, window_bytes=window_bytes
    )


class RayServers:
    """N servers of a plan as Ray actors, and the file that says where they are.

    Every machine must see the plan's data under the same paths, have Penstock installed, and have the files that
    `security` names. Functions that the plan maps must be importable there.

    Args:
        file: Where the addresses are written, one per line, whenever they change.
        count: How many servers.
        bind: Host and port each listens on; with port 0, the default, a free one.
        num_workers: Worker processes of each; by default an even share of the cluster's processors.
        cluster: Address of the cluster; by default that of `RAY_ADDRESS`, or a new one on this machine.

    Raises:
        ServiceError: no server has started in time.
    """

    def __init__(
        self,
        plan: Plan,
        file: str | os.PathLike[str],
        count: int,
        *,
        bind: str = "127.0.0.1:0",
        num_workers: int | None = None,
        security: Security | None = None,
        window_bytes: int = 256 << 20,
        cluster: str | None = None,
    ) -> None:
        if count < 1:
            raise ValueError(f"{count} servers; expected at least 1.")
        if num_workers is not None and num_workers < 1:
            raise ValueError(f"num_workers={num_workers}: a server needs at least one worker process.")
        security = security or Security()
        security.check_server(split_address(bind)[0])
        self._file = Path(file).expanduser()
        self._stack = contextlib.ExitStack()
        self._cluster = self._stack.enter_context(Cluster("serving on a cluster", cluster))
        ray = self._ray = self._cluster.ray
        self.num_workers = max(1, self._cluster.num_cpus // count) if num_workers is None else num_workers
        actor = ray.remote(num_cpus=self.num_workers, max_restarts=-1, scheduling_strategy="SPREAD")(ServerActor)
        self._actors = [actor.remote(plan, bind, self.num_workers, security, window_bytes) for _ in range(count)]
        self._asked: dict[int, Any] = {}
        self._known: dict[int, str] = {}
        self._written: list[str] | None = None
        try:
            self._wait_for_the_first()
        except BaseException:
            self.close()
            raise

    @property
    def addresses(self) -> list[str]:
        """Addresses of the servers that were there when last asked."""
        return [self._known[number] for number in sorted(self._known)]

    def watch(self, is_over: Callable[[], bool]) -> None:
        """Keep the file up to date until `is_over()`."""
        while not is_over():
            self.refresh()

    def refresh(self) -> None:
        """Ask every server where it is, for at most a second; write the file if that has changed."""
        begin = time.monotonic()
        for number, actor in enumerate(self._actors):
            if number not in self._asked:
                self._asked[number] = actor.address.remote()
        numbers = {reference: number for number, reference in self._asked.items()}
        done, _ = self._ray.wait(list(numbers), num_returns=len(numbers), timeout=_TICK_SECONDS)
        for reference in done:
            self._note_address(numbers[reference], self._asked.pop(numbers[reference]))
        self._write()
        time.sleep(max(0.0, begin + _TICK_SECONDS - time.monotonic()))

    def close(self) -> None:
        """End all servers, and the cluster if it was started here."""
        for actor in self._actors:
            with contextlib.suppress(Exception):  # the cluster may be what failed
                self._ray.kill(actor, no_restart=True)
        with contextlib.suppress(OSError):
            self._file.unlink(missing_ok=True)
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _wait_for_the_first(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while not self._known:
            if time.monotonic() > deadline:
                raise ServiceError(
                    f"No server has started on the cluster within {_START_SECONDS:.0f} s. Each asks for "
                    f"{self.num_workers} processors; the cluster has {self._cluster.num_cpus}."
                )
            self.refresh()

    def _note_address(self, number: int, reference: Any) -> None:
        try:
            address = self._ray.get(reference)
        except self._ray.exceptions.RayActorError as error:
            if not self._known and "__init__" in str(error):  # it will not start anywhere
                raise ServiceError(f"A server cannot start: {error}") from None
            if self._known.pop(number, None):
                logger.warning("Server %d is lost; Ray starts it again.", number)
        else:
            if self._known.get(number) != address:
                logger.info("Server %d is at %s.", number, address)
            self._known[number] = address

    def _write(self) -> None:
        if self.addresses != self._written:
            put_in_place(self._file, "".join(f"{address}\n" for address in self.addresses))
            self._written = self.addresses


class ServerActor:
    """What runs on the cluster: one server."""

    def __init__(self, plan: Plan, bind: str, num_workers: int, security: Security, window_bytes: int) -> None:
        self._server = serve(plan, bind, num_workers=num_workers, security=security, window_bytes=window_bytes)

    def address(self) -> str:
        """Where clients reach it."""
        from ray.util import get_node_ip_address

        host, port = split_address(self._server.address)
        if host in _WILDCARDS:
            host = get_node_ip_address()  # type: ignore[no-untyped-call]
        return join_address(host, port)

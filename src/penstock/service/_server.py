"""A server of one plan's batches: HTTP in front of a dispatcher.

    GET /v1/batch/…   a batch (`_wire.BatchRequest`)     GET /healthz   200, or 503 while it leaves
    GET /v1/plan      what is served, as JSON            GET /metrics   for Prometheus

A server has no state that a client could need: any server of the same plan gives the same bytes. It computes one batch
before it listens, so that no client waits while workers start. What a request may take is bounded before it is looked
at: header sizes by aiohttp, connections and silence by `Connections`, the size of an answer here, and what answers hold
for slow readers by an `Allowance`. A request names a fingerprint and numbers: never code, a file, or a plan that the
server was not started with. A server that asks nobody for a secret listens on loopback alone, where it can be reached
by web pages as well, in a browser of this machine: one that has its own name lead to 127.0.0.1 would read batches. Its
requests have that name for a host, and are refused.
"""

import asyncio
import errno
import logging
import os
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from aiohttp import web

from penstock._version import __version__
from penstock.errors import printable
from penstock.machine import default_workers
from penstock.plan import Plan
from penstock.service._dispatcher import Answer, Dispatcher
from penstock.service._limits import HEADER_SECONDS, Allowance, Connections, GuardedConnection, Held, send_body
from penstock.service._settings import Security, is_address, is_token, join_address, split_address
from penstock.service._wire import CHECKSUM_HEADER, VERSION, BatchRequest
from penstock.workers import StartMethod

logger = logging.getLogger(__name__)
_MAX_BODY_BYTES = 8 << 20
"""Answers of several steps are at most this large, or larger by less than a step, as clients of ours ask for them."""
_MAX_STEPS = 4096
_MAX_ROW = 1 << 60
_HELD_BYTES, _HELD_BYTES_PER_WORKER = 8 << 20, 16 << 20
"""What answers may hold until they are sent: enough that no worker waits for a reader that keeps up."""
_FIRST_BATCH_SECONDS = 600.0
_LEAVING = "The server is shutting down."


@dataclass(slots=True)
class ServerStatistics:
    """Totals since the server was started; written by the server's thread alone."""

    num_requests: int = 0
    """Requests of any kind."""
    num_refused: int = 0
    """Requests without the token."""
    num_answers: int = 0
    """Answers with batches that were sent whole."""
    num_steps: int = 0
    """Batches in them."""
    num_bytes: int = 0
    num_broken_off: int = 0
    """Answers that their readers did not take, or not in time."""
    num_waiting: int = 0
    """Requests that wait for their answer now."""


def _metrics_page(statistics: ServerStatistics, dispatcher: Dispatcher, connections: Connections) -> str:
    """Everything, in Prometheus's text format: totals are counters, the rest gauges."""
    computed, times = dispatcher.statistics, os.times()
    metrics = {
        "requests_total": ("Requests of any kind.", statistics.num_requests),
        "refused_total": ("Requests without the token.", statistics.num_refused),
        "answers_total": ("Answers with batches that were sent whole.", statistics.num_answers),
        "batches_total": ("Batches sent.", statistics.num_steps),
        "sent_bytes_total": ("Bytes of the answers sent.", statistics.num_bytes),
        "broken_off_total": ("Answers not taken by their readers.", statistics.num_broken_off),
        "shared_total": ("Requests that another had computed.", computed.num_shared),
        "failed_total": ("Answers that could not be computed.", computed.num_failed),
        "produce_seconds_total": ("Time workers took.", computed.produce_seconds),
        "worker_cpu_seconds_total": ("Processor time of workers.", computed.cpu_seconds),
        "cpu_seconds_total": ("Processor time of the server itself.", times.user + times.system),
        "waiting": ("Requests that wait for their answer.", statistics.num_waiting),
        "queued": ("Requests that workers have before them.", dispatcher.num_queued),
        "workers": ("Worker processes.", dispatcher.num_workers),
        "connections": ("Open connections.", connections.num_open),
        "clients": ("Addresses with open connections.", len(connections.by_address)),
    }
    kinds = {name: "counter" if name.endswith("_total") else "gauge" for name in metrics}
    return "".join(
        f"# HELP penstock_{name} {text}\n# TYPE penstock_{name} {kinds[name]}\npenstock_{name} {value}\n"
        for name, (text, value) in metrics.items()
    )


class Server:
    """Serves a plan until it is closed; in a thread of its own. `serve` makes one, and says what the arguments mean.

    Raises:
        ValueError: the address can be reached by strangers, and nothing keeps them out.
    """

    def __init__(
        self,
        plan: Plan,
        bind: str,
        *,
        num_workers: int | None,
        start_method: StartMethod,
        security: Security | None,
        window_bytes: int,
    ) -> None:
        self.plan = plan
        self._host, self._port = split_address(bind)
        security = security or Security()
        security.check_server(self._host)
        self._token, self._tls = security.token, security.server_context()
        self._asks_nobody = self._token is None and security.authority is None
        self.statistics = ServerStatistics()
        self._is_leaving = False
        count = default_workers("process") if num_workers is None else num_workers
        if count < 1:
            raise ValueError(f"num_workers={num_workers}: a server needs at least one worker process.")
        self._dispatcher = Dispatcher(plan, num_workers=count, start_method=start_method, window_bytes=window_bytes)
        try:
            request = BatchRequest(plan.fingerprint, 0, 1, 0, 1, 0, 1)
            for _ in range(2):  # the first also pays for opening and loading
                first = self._dispatcher.compute(request, _FIRST_BATCH_SECONDS)
            self._step_bytes, self._step_seconds = first.body.num_bytes, first.produce_seconds
            del first
            self._begun = threading.Event()
            self._failure: BaseException | None = None
            self._thread = threading.Thread(target=self._run, name="penstock-server", daemon=True)
            self._thread.start()
            self._begun.wait()
            if self._failure is not None:
                raise self._failure
        except BaseException:
            self._dispatcher.close()
            raise

    @property
    def address(self) -> str:
        """`host:port` it listens on."""
        return join_address(self._host, self._port)

    @property
    def num_workers(self) -> int:
        return self._dispatcher.num_workers

    def close(self, drain_seconds: float = 0.0) -> None:
        """Stop, once the answers that clients wait for are sent, or after `drain_seconds`. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._leave, drain_seconds)
            self._thread.join(drain_seconds + 10)
        self._dispatcher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - raised by __init__
            is_taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            self._failure = OSError(errno.EADDRINUSE, "Address already in use", self.address) if is_taken else error
        finally:
            self._begun.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._dispatcher.attach(self._loop)
        self._left = asyncio.Event()
        self._held = Allowance(_HELD_BYTES + self._dispatcher.num_workers * _HELD_BYTES_PER_WORKER)
        self._connections = Connections(
            self._handle,
            access_log=None,
            lingering_time=0,
            keepalive_timeout=75,
            max_line_size=2048,
            max_field_size=4096,
        )
        listener = await self._loop.create_server(
            self._connections,
            self._host,
            self._port,
            ssl=self._tls,
            ssl_handshake_timeout=HEADER_SECONDS if self._tls else None,
            backlog=1024,
            reuse_address=True,
        )
        self._port = listener.sockets[0].getsockname()[1]
        self._begun.set()
        async with listener:
            await self._left.wait()
        await self._connections.shutdown(1.0)
        self._dispatcher.detach()

    def _leave(self, drain_seconds: float) -> None:
        if not self._is_leaving:
            self._is_leaving = True
            self._leaving = self._loop.create_task(self._drain(drain_seconds))

    async def _drain(self, seconds: float) -> None:
        """Wait until no client waits for an answer, for at most `seconds`; new requests are refused meanwhile."""
        deadline = self._loop.time() + seconds
        while self.statistics.num_waiting and self._loop.time() < deadline:
            await asyncio.sleep(0.02)
        self._left.set()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.statistics.num_requests += 1
        if request.path == "/healthz":
            text, status = ("leaving\n", 503) if self._is_leaving else ("ok\n", 200)
            return web.Response(text=text, status=status)
        if self._token is not None and not is_token(request.headers.get("Authorization"), self._token):
            self.statistics.num_refused += 1
            return _refuse(401, "The token is missing or wrong.")
        if self._asks_nobody and not is_address(request.headers.get("Host")):
            return _refuse(421, "Without a token, ask for this server by its address, or as localhost.")
        if request.method != "GET" or request.body_exists:
            return _refuse(405, "Only GET, without a body.")
        assert isinstance(request.protocol, GuardedConnection)
        with request.protocol.answering():
            return await self._answer(request)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path.startswith("/v1/batch/"):
            return await self._batch(request)
        pages: dict[str, Callable[[], web.Response]] = {"/v1/plan": self._describe, "/metrics": self._metrics}
        if request.path == "/v1/plan" and self._is_leaving:
            return _refuse(503, _LEAVING)
        page = pages.get(request.path)
        return page() if page else _refuse(404, "There is /v1/plan, /v1/batch/…, /metrics and /healthz.")

    async def _batch(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            wanted = self._parse(request.path)
        except ValueError as error:
            return _refuse(400, str(error))
        if wanted.fingerprint != self.plan.fingerprint:
            return _refuse(409, f"This server has the plan {self.plan.fingerprint}.")
        if self._is_leaving:
            return _refuse(503, _LEAVING)
        self.statistics.num_waiting += 1
        try:
            connection = request.protocol
            assert isinstance(connection, GuardedConnection)
            size = self._expected_bytes(wanted)
            async with self._held.hold(size, connection.address, is_trusted=connection.has_taken) as held:
                try:
                    answer = await asyncio.shield(self._dispatcher.answer(wanted))
                except Exception as error:  # noqa: BLE001 - what the plan's functions raise is told to the client
                    return _failure(error)
                response = await self._send(request, answer, held)
                connection.has_taken = True
                return response
        except (OSError, asyncio.CancelledError):
            self.statistics.num_broken_off += 1
            raise
        finally:
            self.statistics.num_waiting -= 1

    def _parse(self, path: str) -> BatchRequest:
        segments = path.split("/")[3:]
        if len(segments) != len(BatchRequest._fields):
            raise ValueError("Expected /v1/batch/" + "/".join(f"<{name}>" for name in BatchRequest._fields))
        request = BatchRequest.parse(dict(zip(BatchRequest._fields, segments, strict=True)))
        size = self.plan.global_size
        if size % request.world_size or size // request.world_size % request.parts:
            raise ValueError(f"Batches of {size} rows cannot be shared evenly by {request.world_size} ranks.")
        if request.row + request.steps * size > _MAX_ROW:
            raise ValueError(f"Row {request.row} is beyond the end of any run: 2**60.")
        is_large = (
            request.steps > 1 and self._expected_bytes(request._replace(steps=request.steps - 1)) >= _MAX_BODY_BYTES
        )
        if request.steps > _MAX_STEPS or is_large:
            raise ValueError(f"{request.steps} steps are more than one answer may have.")
        return request

    def _expected_bytes(self, request: BatchRequest) -> int:
        """Estimated size of an answer, from that of the first batch."""
        num_bytes = request.steps * self._step_bytes // request.world_size
        return num_bytes if request.steps > 1 else num_bytes // request.parts

    async def _send(self, request: web.BaseRequest, answer: Answer, held: Held) -> web.StreamResponse:
        headers = {CHECKSUM_HEADER: f"{answer.checksum:08x}", "Content-Type": "application/octet-stream"}
        response = web.StreamResponse(headers=headers)
        response.content_length = answer.body.num_bytes
        await response.prepare(request)
        if request.transport is None:
            raise ConnectionResetError("The reader is gone.")
        await send_body(response, request.transport, answer.body.buffers, held)
        self.statistics.num_answers += 1
        self.statistics.num_steps += answer.num_steps
        self.statistics.num_bytes += answer.body.num_bytes
        return response

    def _describe(self) -> web.Response:
        description = {
            "version": VERSION,
            "penstock": __version__,
            "fingerprint": self.plan.fingerprint,
            "workers": self._dispatcher.num_workers,
            "num_rows": self.plan.steps.num_rows,
            "global_size": self.plan.steps.global_size,
            "tail": self.plan.steps.tail,
            "step_bytes": self._step_bytes,
            "step_seconds": self._step_seconds,
            "max_body_bytes": _MAX_BODY_BYTES,
            "max_steps": _MAX_STEPS,
        }
        return web.json_response(description)

    def _metrics(self) -> web.Response:
        page = _metrics_page(self.statistics, self._dispatcher, self._connections)
        return web.Response(text=page, content_type="text/plain", charset="utf-8")


def _refuse(status: int, reason: str) -> web.Response:
    """An error that ends the connection, so that nothing more of it is read."""
    response = web.json_response({"error": reason}, status=status)
    response.force_close()
    return response


def _failure(error: Exception) -> web.Response:
    trace = printable("".join(traceback.format_exception(error))[-20_000:], keep="\n\t")
    logger.warning("A batch could not be computed: %s", printable(str(error), keep="\n\t"))
    return web.json_response({"error": f"{type(error).__name__}: {error}", "traceback": trace}, status=500)

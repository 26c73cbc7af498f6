"""Readers that are slow, stopped or behind a slow network: those that hold up others are cut off, and only those."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import multiprocessing
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.service import Remote, Security, make_certificates, serve
from waiting import wait_until

from .processes import written_plan

MIB = 1 << 20


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> penstock.Plan:
    return penstock.load_plan(written_plan(tmp_path_factory.mktemp("plan")))


@pytest.fixture(params=["tcp", "tls"])
def server(request: pytest.FixtureRequest, plan: penstock.Plan, tmp_path: Path) -> Iterator[Any]:
    security, tls = None, None
    if request.param == "tls":
        files = make_certificates(tmp_path, ["127.0.0.1"])
        security = Security(certificate=files.server[0], key=files.server[1])
        tls = ssl.create_default_context(cafile=files.authority)
    with serve(plan, "127.0.0.1:0", num_workers=1, security=security, window_bytes=0) as server:
        yield server, tls


def connect(
    server: Any,
    tls: ssl.SSLContext | None,
    source: str = "127.0.0.1",
    *,
    seconds: float = 20.0,
    receive_bytes: int = 0,
) -> socket.socket:
    host, _, port = server.address.rpartition(":")
    raw = socket.socket()
    raw.settimeout(seconds)
    if source != "127.0.0.1":
        raw.bind((source, 0))
    if receive_bytes:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    raw.connect((host, int(port)))
    return raw if tls is None else tls.wrap_socket(raw, server_hostname="127.0.0.1")


def largest_steps(server: Any, tls: ssl.SSLContext | None) -> int:
    """Steps in the largest answer that the server says it gives."""
    with contextlib.closing(http.client.HTTPConnection(server.address)) as connection:
        connection.sock = connect(server, tls)
        connection.request("GET", "/v1/plan")
        said = json.loads(connection.getresponse().read())
    return int(said["max_body_bytes"] // said["step_bytes"])


class SlowReader:
    """Asks for large answers again and again, and reads each of them slowly."""

    def __init__(
        self, server: Any, tls: Any, rate: int, *, source: str = "127.0.0.1", steps: int | None = None
    ) -> None:
        self._server, self._tls, self._rate, self._source = server, tls, rate, source
        self._steps = largest_steps(server, tls) if steps is None else steps
        self.is_over = False
        self.num_whole = self.num_cut = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> SlowReader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over = True
        self._thread.join()

    def _run(self) -> None:
        for number in itertools.count():
            if self.is_over:
                return
            num_read = 0
            with contextlib.suppress(OSError):
                for found in self._read(number):
                    num_read += found
            is_whole = num_read > self._steps * MIB // 4
            self.num_whole += is_whole
            self.num_cut += not (is_whole or self.is_over)

    def _read(self, number: int) -> Iterator[int]:
        with connect(self._server, self._tls, self._source, seconds=2.0, receive_bytes=4096) as reader:
            path = f"/v1/batch/{self._server.plan.fingerprint}/{128 * number}/{self._steps}/0/1/0/1"
            reader.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
            while not self.is_over:
                try:
                    if not (found := reader.recv(max(1, self._rate // 20))):
                        return
                except TimeoutError:
                    continue
                time.sleep(len(found) / self._rate)
                yield len(found)


def ask_honestly(server: Any, tls: Any, count: int) -> None:
    """Take the largest answers, one after the other, each within the time limit of the connection."""
    steps, seconds = largest_steps(server, tls), []
    with contextlib.closing(http.client.HTTPConnection(server.address)) as connection:
        connection.sock = connect(server, tls)
        for number in range(count):
            begin = time.monotonic()
            connection.request("GET", f"/v1/batch/{server.plan.fingerprint}/{128 * number}/{steps}/0/1/0/1")
            response = connection.getresponse()
            assert response.status == 200
            assert len(response.read()) > 7 * MIB
            seconds.append(f"{time.monotonic() - begin:.2f} s")
    print(seconds)


@pytest.mark.timeout(180)
def test_readers_of_large_answers_that_are_slow_stop_a_server_for_nobody(server: Any) -> None:
    server, tls = server
    ask_honestly(server, tls, 1)
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(SlowReader(server, tls, 30_000)) for _ in range(6)]
        time.sleep(2)
        ask_honestly(server, tls, 6)
        assert any(reader.num_cut for reader in readers)


@pytest.mark.timeout(180)
def test_an_address_whose_readers_are_just_fast_enough_holds_no_more_than_its_share(server: Any) -> None:
    server, tls = server
    with contextlib.ExitStack() as stack:
        for _ in range(6):
            stack.enter_context(SlowReader(server, tls, 300_000, source="127.0.0.2"))
        time.sleep(2)
        ask_honestly(server, tls, 6)


def test_whoever_asks_and_leaves_waits_for_nothing(server: Any) -> None:
    """Also after closing only its own half, which ends the connection as far as limits on connections go."""
    server, tls = server
    steps = largest_steps(server, tls)
    for number in range(300):
        with connect(server, tls) as leaver, contextlib.suppress(OSError):
            path = f"/v1/batch/{server.plan.fingerprint}/{128 * number}/{steps}/0/1/0/1"
            leaver.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
            leaver.shutdown(socket.SHUT_WR)
    assert wait_until(lambda: server.statistics.num_waiting <= 4, 2.0), server.statistics
    ask_honestly(server, tls, 2)


def train(address: str, plan_file: str, connection: Any) -> None:
    """A trainer that says so after its first batch, and goes on."""
    loader = penstock.DataLoader(penstock.load_plan(plan_file), remote=address)
    for number, _ in enumerate(itertools.chain.from_iterable(itertools.repeat(loader))):
        if number == 0:
            connection.send(os.getpid())


@pytest.mark.timeout(180)
def test_a_stopped_trainer_does_not_hold_up_the_others(tmp_path: Path) -> None:
    plan_file = written_plan(tmp_path, num_rows=512, row_values=65_536)  # more than the kernel takes for a reader
    plan = penstock.load_plan(plan_file)
    with serve(plan, "127.0.0.1:0", num_workers=1, window_bytes=0) as server, contextlib.ExitStack() as stack:
        context = multiprocessing.get_context("spawn")
        trainers = []
        for _ in range(3):
            ours, theirs = context.Pipe()
            trainer = context.Process(target=train, args=(server.address, os.fspath(plan_file), theirs), daemon=True)
            trainer.start()
            stack.callback(trainer.join)
            stack.callback(trainer.kill)
            trainers.append((trainer, ours))
        for trainer, ours in trainers:
            assert ours.poll(120)
            assert ours.recv() == trainer.pid
        for trainer, _ in trainers:
            assert trainer.pid is not None
            os.kill(trainer.pid, signal.SIGSTOP)
        begin = time.monotonic()
        with penstock.DataLoader(plan, remote=Remote(servers=server.address, timeout_seconds=20.0)) as loader:
            for _ in range(5):
                assert len(list(loader)) == 4
        print(f"20 batches in {time.monotonic() - begin:.1f} s")


@pytest.mark.stress
@pytest.mark.timeout(300)
def test_readers_behind_a_slow_network_are_all_served(server: Any) -> None:
    server, tls = server
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(SlowReader(server, tls, 400_000, steps=32)) for _ in range(6)]
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not all(reader.num_whole for reader in readers):
            time.sleep(0.5)
        assert [reader.num_cut for reader in readers] == [0] * 6
        assert all(reader.num_whole for reader in readers)

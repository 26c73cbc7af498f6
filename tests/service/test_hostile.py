"""Strangers and bad clients: a server stays up, small, and open to others, whatever it is sent."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import random
import resource
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

import penstock
from penstock.service import Security, _limits, make_certificates, serve
from waiting import wait_until

from .processes import Addressed, ServeProcess, written_plan

TOKEN = "a secret of many characters"
MIB = 1 << 20


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written_plan(tmp_path_factory.mktemp("plan"))


@pytest.fixture(scope="module", params=["tcp", pytest.param("tls", marks=pytest.mark.stress)])
def server(request: pytest.FixtureRequest, plan_file: Path) -> Iterator[ServeProcess]:
    """With a token, on loopback; keeps nothing for others, so that its memory is that of requests."""
    token = plan_file.parent / "token"
    token.write_text(TOKEN)
    options = ["--token-file", os.fspath(token), "--share-mb", "0"]
    if request.param == "tls":
        files = make_certificates(plan_file.parent / "keys", ["127.0.0.1"])
        certificate, key = map(os.fspath, files.server)
        options += ["--certificate", certificate, "--key", key]
    with ServeProcess(plan_file, *options) as server:
        if request.param == "tls":
            server.tls = ssl.create_default_context(cafile=files.authority)
        for _ in range(3):
            assert_serves(server, plan_file)
        yield server


def connect(server: Addressed, seconds: float = 60) -> socket.socket:
    raw = knock(server, seconds)
    tls = getattr(server, "tls", None)
    return raw if tls is None else tls.wrap_socket(raw, server_hostname="127.0.0.1")


def knock(server: Addressed, seconds: float = 60) -> socket.socket:
    """A connection on which nothing was said yet, not even of TLS."""
    host, _, port = server.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=seconds)


def get(server: ServeProcess, path: str, token: str = TOKEN) -> tuple[int, bytes]:
    with contextlib.closing(http.client.HTTPConnection(server.address, timeout=60)) as connection:
        connection.sock = connect(server)
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
        response = connection.getresponse()
        return response.status, response.read()


def batch_path(plan_file: Path, step: int = 0, steps: int = 4) -> str:
    return f"/v1/batch/{penstock.load_plan(plan_file).fingerprint}/{step * 128}/{steps}/0/1/0/1"


def assert_serves(server: ServeProcess, plan_file: Path) -> None:
    status, body = get(server, batch_path(plan_file))
    assert (status, server.is_alive) == (200, True)
    assert len(body) > MIB


@contextlib.contextmanager
def growth_below(server: ServeProcess, mib: float) -> Iterator[None]:
    """The server's peak of memory grows by no more than this."""
    Path(f"/proc/{server.pid}/clear_refs").write_text("5")  # the peak begins anew
    before = server.memory_mib()
    yield
    growth = server.memory_mib() - before
    print(f"+{growth:.1f} MiB of at most {mib}")
    assert growth <= mib


def swallow(server: ServeProcess, request: bytes, count: int) -> None:
    """Send a request and `count` MiB behind it, as far as the server lets us."""
    with connect(server) as stranger, contextlib.suppress(OSError):
        stranger.sendall(request)
        for _ in range(count):
            stranger.sendall(bytes(MIB))


@pytest.mark.parametrize("framing", ["Content-Length: 314572800", "Transfer-Encoding: chunked"])
def test_large_requests_of_strangers_take_no_memory(framing: str, server: ServeProcess, plan_file: Path) -> None:
    request = f"POST {batch_path(plan_file)} HTTP/1.1\r\nHost: x\r\n{framing}\r\n\r\n".encode()
    if "chunked" in framing:
        request += b"12c00000\r\n"
    with growth_below(server, 8):
        strangers = [threading.Thread(target=swallow, args=(server, request, 300)) for _ in range(8)]
        for stranger in strangers:
            stranger.start()
        for stranger in strangers:
            stranger.join()
    assert_serves(server, plan_file)


def memory_of_workers(server: ServeProcess) -> float:
    """MiB of memory of their own: what they map of the data is the kernel's to keep or drop."""
    total = 0
    for worker in psutil.Process(server.pid).children(recursive=True):
        fields = dict(line.split(":") for line in Path(f"/proc/{worker.pid}/status").read_text().splitlines())
        total += sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem"))
    return total / 1024


@pytest.mark.stress
def test_the_largest_answers_take_no_more_of_workers_memory_for_many_strangers_than_for_one(tmp_path: Path) -> None:
    plan_file = written_plan(tmp_path, num_rows=2048, row_values=65536, batch=64)  # 8 MiB a batch
    paths = [batch_path(plan_file, step, steps=1).replace(f"/{128 * step}/", f"/{64 * step}/") for step in range(24)]
    with ServeProcess(plan_file, "--share-mb", "0") as server:
        assert len(get(server, paths[0])[1]) > 8 * MIB
        before = peak = memory_of_workers(server)
        with ThreadPoolExecutor(8) as strangers:
            asked = [strangers.submit(get, server, path) for path in paths * 2]
            while not all(each.done() for each in asked):
                peak = max(peak, memory_of_workers(server))
                time.sleep(0.02)
        assert {each.result()[0] for each in asked} == {200}
    assert peak <= before + 24  # two batches of a worker and a margin, not 8 or 48


def test_an_endless_header_takes_no_memory(server: ServeProcess, plan_file: Path) -> None:
    with growth_below(server, 8):
        for start in (b"GET /", b"GET / HTTP/1.1\r\nX: ", b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 100_000):
            swallow(server, start + b"a" * MIB, 20)
    assert_serves(server, plan_file)


def test_garbage_is_no_request(server: ServeProcess, plan_file: Path) -> None:
    noise = random.Random(3)
    for _ in range(100):
        with connect(server) as stranger, contextlib.suppress(OSError):
            stranger.sendall(noise.randbytes(noise.randrange(1, 2000)) + noise.choice([b"", b"\r\n\r\n"]))
            stranger.shutdown(socket.SHUT_WR)
            stranger.recv(1000)
    assert_serves(server, plan_file)


@pytest.mark.parametrize(
    "numbers",
    [
        "0/4096/0/1/0/1",
        "0/999999999/0/1/0/1",
        f"0/{2**61}/0/1/0/1",
        f"{2**62 - 1}/1/0/1/0/1",
        f"{2**62 - 128}/1/0/1/0/1",
        f"{2**60}/1/0/1/0/1",
        f"0/1/0/{2**61}/0/1",
        f"0/1/0/1/0/{2**61}",
        "9" * 1900,
        "-1/1/0/1/0/1",
        "0/1/0/1/0/1/../../../../etc/passwd",
    ],
)
def test_numbers_out_of_range_are_refused(numbers: str, server: ServeProcess, plan_file: Path) -> None:
    fingerprint = penstock.load_plan(plan_file).fingerprint
    with growth_below(server, 8):
        status, said = get(server, f"/v1/batch/{fingerprint}/{numbers}")
    assert status == 400, said
    assert_serves(server, plan_file)


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=[pytest.mark.stress, pytest.mark.timeout(600)])])
def test_wrong_tokens_are_refused_and_counted(count: int, server: ServeProcess, plan_file: Path) -> None:
    def refused() -> int:
        page = get(server, "/metrics")[1].decode()
        return next(int(line.split()[1]) for line in page.splitlines() if line.startswith("penstock_refused_total "))

    before = refused()
    with growth_below(server, 8):
        for number in range(count):
            status, said = get(server, batch_path(plan_file), f"{TOKEN[:-1]}{number}")
            assert (status, json.loads(said)) == (401, {"error": "The token is missing or wrong."})
    assert refused() - before == count
    assert_serves(server, plan_file)


def test_half_open_connections_keep_nobody_out(server: ServeProcess, plan_file: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(4096, hard)), hard))
    with contextlib.ExitStack() as stack:
        for _ in range(1000):
            with contextlib.suppress(OSError):
                stack.enter_context(connect(server)).sendall(b"GET /v1/plan HTTP/1.1\r\nHost: ")
        begin = time.monotonic()
        assert_serves(server, plan_file)
        print(f"served within {time.monotonic() - begin:.2f} s")


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01\x02\x00\x01"])
def test_connections_that_say_nothing_keep_nobody_out(said: bytes, server: ServeProcess, plan_file: Path) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(500):
            with contextlib.suppress(OSError):
                stack.enter_context(knock(server)).sendall(said)
        begin = time.monotonic()
        assert_serves(server, plan_file)
        print(f"served within {time.monotonic() - begin:.2f} s")


@pytest.mark.parametrize("steps", [4, 32])
def test_slow_readers_take_little_memory_however_large_their_answers_are(
    steps: int, server: ServeProcess, plan_file: Path
) -> None:
    with growth_below(server, 30), contextlib.ExitStack() as stack:
        for number in range(20):
            reader = stack.enter_context(connect(server))
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            path = batch_path(plan_file, number * steps, steps)
            reader.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
        time.sleep(2)
    assert_serves(server, plan_file)


@pytest.fixture(params=["tcp", "tls"])
def patient(
    request: pytest.FixtureRequest, plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """Gives up readers after a short while."""
    monkeypatch.setattr(_limits, "_READER_SECONDS", 0.5)
    security = None
    if request.param == "tls":
        files = make_certificates(tmp_path, ["127.0.0.1"])
        security = Security(certificate=files.server[0], key=files.server[1])
    with serve(penstock.load_plan(plan_file), "127.0.0.1:0", num_workers=1, security=security) as server:
        if security is not None:
            monkeypatch.setattr(server, "tls", ssl.create_default_context(cafile=files.authority), raising=False)
        yield server


def test_a_reader_that_does_not_even_take_a_header_is_cut_off(
    patient: Any, plan_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(patient) as reader:
        reader.sendall(b"GET /v1/plan HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        reader.recv(1)
        (transport,) = [mate.transport for mates in patient._connections.by_address.values() for mate in mates]
        assert isinstance(transport, asyncio.Transport)
        while not transport.get_write_buffer_size():  # fill what the kernel holds for it, so that no header fits
            reader.sendall(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            time.sleep(0.001)
        reader.sendall(f"GET {batch_path(plan_file, steps=32)} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        wait_until(lambda: patient.statistics.num_broken_off == 1)
        wait_until(lambda: not patient._connections.num_open)
    assert patient._held.num_free == patient._held._limit
    assert not caplog.records


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("127.0.0.1:8815", 200),
        ("[::1]:8815", 200),
        ("localhost:8815", 200),
        ("10.0.0.7", 200),
        ("rebound.example", 421),
        ("rebound.example:8815", 421),
        ("localhost.rebound.example", 421),
        ("127.0.0.1.rebound.example", 421),
        ("127.0.0.1@rebound.example", 421),
    ],
)
def test_web_pages_whose_name_leads_to_loopback_read_nothing(host: str, status: int, named_server: Any) -> None:
    for path in ("/v1/plan", "/metrics", f"/v1/batch/{named_server.plan.fingerprint}/0/1/0/1/0/1"):
        with contextlib.closing(http.client.HTTPConnection(named_server.address, timeout=60)) as browser:
            browser.request("GET", path, headers={"Host": host})
            assert browser.getresponse().status == status


@pytest.fixture(scope="module")
def named_server(plan_file: Path) -> Iterator[Any]:
    with serve(penstock.load_plan(plan_file), "127.0.0.1:0", num_workers=1) as server:
        yield server


def test_connections_that_spoke_once_and_went_silent_keep_nobody_out(server: ServeProcess, plan_file: Path) -> None:
    """The one that is idle longest makes room."""
    spoken = f"GET /v1/plan HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(4096, hard)), hard))
    with contextlib.ExitStack() as stack, contextlib.closing(http.client.HTTPConnection(server.address)) as used:
        used.sock = connect(server)
        for number in range(1000):
            talker = stack.enter_context(connect(server))
            talker.sendall(spoken)
            assert talker.recv(1000)
            if number % 50 == 0:
                used.request("GET", "/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
                page = used.getresponse().read().decode()
                assert "penstock_connections" in page
        num_open = next(int(line.split()[1]) for line in page.splitlines() if line.startswith("penstock_connections "))
        assert num_open <= 600
        begin = time.monotonic()
        assert_serves(server, plan_file)
        print(f"served within {time.monotonic() - begin:.2f} s, {num_open} open")


def test_strangers_write_no_tracebacks_into_the_log(caplog: pytest.LogCaptureFixture, plan_file: Path) -> None:
    with serve(penstock.load_plan(plan_file), "127.0.0.1:0", num_workers=1) as server, connect(server) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 1000)
        assert b" 400 " in stranger.recv(100)
    assert not caplog.records

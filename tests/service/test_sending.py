"""How much answers hold, and how their bytes leave."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
import threading
from pathlib import Path

import pytest
from aiohttp import web

from penstock.service import make_certificates
from penstock.service._limits import Allowance, Held, _send_all, send_body

ADDRESS = "127.0.0.1"


def held() -> Held:
    return Held(ADDRESS, 1, True, asyncio.get_running_loop().create_future())


async def hold(allowance: Allowance, name: str, num_bytes: int, log: list[str]) -> None:
    async with allowance.hold(num_bytes, ADDRESS, is_trusted=True):
        log.append(name)
        await asyncio.sleep(0.01)
        log.append(name.upper())


def test_whoever_asks_beyond_the_allowance_waits_and_all_are_let_in_as_they_came() -> None:
    async def run() -> list[str]:
        allowance, log = Allowance(10), []
        asked = {"a": 6, "b": 3, "c": 5, "d": 1}  # d would fit beside a and b, but c was there before
        await asyncio.gather(*(hold(allowance, name, size, log) for name, size in asked.items()))
        return log

    log = asyncio.run(run())
    assert [name for name in log if name.islower()] == ["a", "b", "c", "d"]
    assert log.index("A") < log.index("c")


def test_what_is_larger_than_everything_has_everything() -> None:
    async def run() -> list[str]:
        allowance, log = Allowance(10), []
        await asyncio.gather(*(hold(allowance, name, size, log) for name, size in {"a": 1, "b": 99, "c": 1}.items()))
        return log

    assert asyncio.run(run()) == ["a", "A", "b", "B", "c", "C"]


@pytest.mark.parametrize("is_let_in", [False, True])
def test_whoever_is_told_to_leave_gives_back_what_it_had(is_let_in: bool) -> None:
    async def run() -> None:
        allowance, log = Allowance(10), []
        first = asyncio.create_task(hold(allowance, "a", 10, log))
        second = asyncio.create_task(hold(allowance, "b", 10, log))
        await asyncio.sleep(0)
        if is_let_in:
            first.cancel()
            await asyncio.sleep(0)  # the place is b's, which does not know it yet
        second.cancel()
        await asyncio.wait([first, second])
        async with asyncio.timeout(5), allowance.hold(10, ADDRESS, is_trusted=True):
            pass

    asyncio.run(run())


@pytest.mark.parametrize("num_buffers", [1, 3000])
def test_bodies_in_many_pieces_arrive_whole_at_readers_of_any_speed(num_buffers: int) -> None:
    body = random.Random(0).randbytes(8 << 20)
    size = -(-len(body) // num_buffers)
    buffers = [memoryview(body)[begin : begin + size] for begin in range(0, len(body), size)]

    async def run() -> bytes:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            theirs.setblocking(False)
            sending = asyncio.create_task(_send_all(ours, buffers, held()))
            found = b""
            while len(found) < len(body):
                found += await asyncio.get_running_loop().sock_recv(theirs, 1 << 18)
            await sending
        return found

    assert asyncio.run(run()) == body


def test_a_reader_who_leaves_a_tls_server_leaves_no_word_in_its_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """asyncio learns of it between two chunks, and warns of each that is written after that."""
    files = make_certificates(tmp_path / "keys", ["127.0.0.1"])
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(*files.server)
    has_asked, has_left = threading.Event(), threading.Event()
    ended: list[BaseException] = []

    def ask_and_leave(port: int) -> None:
        raw = socket.create_connection(("127.0.0.1", port))
        with ssl.create_default_context(cafile=files.authority).wrap_socket(raw, server_hostname="127.0.0.1") as reader:
            reader.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            has_asked.wait()
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1" + bytes(7))  # the connection is reset
        has_left.set()

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        transport = request.transport
        assert transport is not None
        has_asked.set()
        has_left.wait()  # the loop does not see it before it writes
        try:
            await send_body(response, transport, [memoryview(bytes(8)), memoryview(bytes(32 << 20))], held())
        except OSError as error:
            ended.append(error)
        return response

    async def run() -> None:
        loop = asyncio.get_running_loop()
        server = web.Server(answer, access_log=None)
        listener = await loop.create_server(server, "127.0.0.1", 0, ssl=tls)
        async with listener:
            port = listener.sockets[0].getsockname()[1]
            await asyncio.gather(asyncio.to_thread(ask_and_leave, port))
            while not ended:
                await asyncio.sleep(0.01)
        await server.shutdown(1.0)

    asyncio.run(asyncio.wait_for(run(), 60))
    assert caplog.messages == []

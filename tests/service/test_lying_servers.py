"""Servers that lie: whatever one answers, a loader gets batches, or an error of ours that is safe to print."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import random
import re
import socket
import socketserver
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from guarding import guarded, naming, use_or_refuse
from mutating import mutate
from penstock.cli import main
from penstock.errors import CorruptionError, FormatError, ServiceError, printable
from penstock.loader import Bundle, Item, LoaderStatistics, SlotPool, private_slot
from penstock.schema import Ragged
from penstock.service import Remote, RemoteEngine, Security, Servers, read_servers, serve
from penstock.service._answers import AnswerReader
from penstock.service._wire import decode, encode
from penstock.shards import checksum
from waiting import wait_until

from .processes import Addressed

ESCAPE = "\x1b]0;owned\x07\x1b[2J"
Answer = Callable[[str], bytes]
"""What is sent for a path, status line and all."""


def http(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    lines = (f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers)
    return "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n" + body


def as_json(value: Any, status: str = "200 OK") -> bytes:
    return http(json.dumps(value).encode(), status)


@contextlib.contextmanager
def liar(answer: Answer) -> Iterator[str]:
    """The address of a server that answers like this, once for each connection."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            path = self.rfile.readline(4096).split()[1].decode()
            with contextlib.suppress(OSError):
                while self.rfile.readline(4096).strip():
                    pass
                self.wfile.write(answer(path))

    class LiarServer(socketserver.ThreadingTCPServer):
        daemon_threads = allow_reuse_address = True

    with LiarServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def plan() -> penstock.Plan:
    columns = {"x": np.arange(60_000).reshape(100, 600), "y": Ragged.from_lengths(np.arange(300), [3] * 100)}
    return penstock.from_arrays(columns).shuffle(seed=1).batch(10)


@pytest.fixture(scope="module")
def honest(plan: penstock.Plan) -> Iterator[Addressed]:
    with serve(plan, "127.0.0.1:0", num_workers=1) as server:
        yield server


def asked(server: Addressed, path: str) -> bytes:
    with contextlib.closing(HTTPConnection(server.address, timeout=60)) as connection:
        connection.request("GET", path)
        return connection.getresponse().read()


def load(plan: penstock.Plan, servers: Servers, seconds: float = 60.0) -> list[Any]:
    with penstock.DataLoader(plan, remote=Remote(servers=servers, timeout_seconds=seconds)) as loader:
        return list(itertools.islice(loader, 3))


PAGES: dict[str, bytes] = {
    "nothing": b"",
    "no HTTP": b"\x00\xff" * 100,
    "no JSON": http(b"<html>"),
    "JSON too deep": http(b"[" * 500_000),
    "no object": as_json([1, 2]),
    "no version": as_json({}),
    "breaks off": http(b"{}" + b" " * 100)[:-50],
    "chunks that are none": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n" + b"x" * 100,
    "control characters": as_json({"error": ESCAPE}, "403 Forbidden"),
    "a long reason": as_json({"error": "x" * 500_000}, "403 Forbidden"),
    "a reason too deep": http(b"[" * 500_000, "403 Forbidden"),
    "another fingerprint": as_json({"version": 1, "fingerprint": ESCAPE}),
    "elsewhere": http(b"", "302 Found", "Location: http://127.0.0.1:9/"),
}


def reasons_given(plan: penstock.Plan, pages: Sequence[bytes]) -> list[str]:
    """What a loader says of servers that answer whatever they are asked with these pages."""
    with contextlib.ExitStack() as stack:
        addresses = [stack.enter_context(liar(lambda _, page=page: page)) for page in pages]
        with pytest.raises(ServiceError) as raised:
            load(plan, addresses, seconds=3.0)
    message = str(raised.value)
    assert printable(message, keep="\n") == message
    lines = message.splitlines()
    return [next(line for line in lines if line.startswith(f"  {address}: ")) for address in addresses]


def test_servers_that_make_no_sense_are_named_with_reasons_that_are_safe_to_print(plan: penstock.Plan) -> None:
    for name, reason in zip(PAGES, reasons_given(plan, [*PAGES.values()]), strict=True):
        assert "not asked yet" not in reason, name
        assert len(reason) < 600, name


def test_servers_that_claim_more_than_there_can_be_are_refused(plan: penstock.Plan, honest: Addressed) -> None:
    page = json.loads(asked(honest, "/v1/plan"))
    claims = ({"workers": 10**9}, {"workers": True}, {"step_bytes": 2**62}, {"workers": -1})
    for reason in reasons_given(plan, [as_json(page | claim) for claim in claims]):
        assert "does not say how many workers it has" in reason
    claims = ({"step_seconds": float("nan")}, {"step_seconds": -1.0}, {"step_seconds": 1e300}, {"step_seconds": "1"})
    for reason in reasons_given(plan, [as_json(page | claim) for claim in claims]):
        assert "does not say how long a batch takes" in reason


def bodies_of(honest: Addressed, lie: Callable[[bytes], bytes]) -> Answer:
    """Answers like the honest server, but for the bodies of batches."""
    return lambda path: lie(asked(honest, path)) if path.startswith("/v1/batch/") else http(asked(honest, path))


def signed(body: bytes, *headers: str) -> bytes:
    return http(body, "200 OK", f"Penstock-Checksum: {checksum(body):08x}", *headers)


@pytest.mark.parametrize("header", ["Connection: keep-alive", "Connection: close"])
def test_a_proxy_that_tells_the_truth_is_believed(header: str, plan: penstock.Plan, honest: Addressed) -> None:
    with liar(bodies_of(honest, lambda body: signed(body, header))) as address:
        assert len(load(plan, address)) == 3


def test_bodies_that_are_always_damaged_are_an_error_of_ours(plan: penstock.Plan, honest: Addressed) -> None:
    with liar(bodies_of(honest, lambda body: http(body[:-1] + b"!"))) as address:
        with pytest.raises(CorruptionError, match="bytes arrived damaged") as raised:
            load(plan, address)
        assert raised.value.__notes__ == [f"This is what {address} sent."]


def test_a_body_that_arrives_damaged_is_asked_for_again_and_counted(plan: penstock.Plan, honest: Addressed) -> None:
    flips = iter([1])

    def damage_the_first(body: bytes) -> bytes:
        sent = signed(body)
        return sent[:-1] + bytes([sent[-1] ^ next(flips, 0)])

    with liar(bodies_of(honest, damage_the_first)) as address:
        remote = Remote(servers=address, timeout_seconds=60.0)
        with penstock.DataLoader(plan, remote=remote) as loader:
            batches = list(itertools.islice(loader, 3))
            assert wait_until(lambda: loader.stats().num_damaged == 1)  # it may be the answer for a batch further ahead
            assert "1 answer arrived damaged" in str(loader.stats())
    assert all(np.array_equal(batch["x"], plan.read(step)["x"]) for step, batch in enumerate(batches))


def test_answers_that_do_not_come_are_waited_for_together_and_not_one_after_the_other(
    plan: penstock.Plan, honest: Addressed
) -> None:
    page, asked_for, is_over = http(asked(honest, "/v1/plan")), list[str](), threading.Event()

    def answer(path: str) -> bytes:
        if path == "/v1/plan":
            return page
        asked_for.append(path)
        is_over.wait(60)
        return b""

    with liar(answer) as address:
        engine = RemoteEngine(plan, Remote(servers=address, timeout_seconds=2.0), LoaderStatistics())
        for ticket in range(4):
            engine.submit(ticket, Item(10 * ticket))
        assert wait_until(lambda: len(asked_for) == 8, 6.0)  # all of them once more
        assert Counter(asked_for).most_common(1)[0][1] == 2
        is_over.set()
        engine.close()


def test_an_endless_body_is_not_read(plan: penstock.Plan, honest: Addressed) -> None:
    endless = b"HTTP/1.1 200 OK\r\n\r\n" + bytes(1 << 20)
    with liar(bodies_of(honest, lambda _: endless)) as address, pytest.raises(ServiceError, match="how much it sends"):
        load(plan, address)


def test_what_failed_on_a_server_is_safe_to_print(plan: penstock.Plan, honest: Addressed) -> None:
    failure = as_json({"error": ESCAPE, "traceback": [ESCAPE] * 100_000}, "500 Internal Server Error")
    with liar(bodies_of(honest, lambda _: failure)) as address, pytest.raises(penstock.errors.RemoteFailed) as raised:
        load(plan, address)
    message = str(raised.value)
    assert printable(message, keep="\n\t") == message
    assert len(message) < 100_000


def forged(body: bytes, generator: random.Random) -> bytes:
    """A body with one or two places of its header changed."""
    end = 8 + int.from_bytes(body[:8], "little")
    header = json.loads(body[8:end])
    if generator.random() < 0.5:
        form = json.loads(header["__metadata__"]["penstock.form"])
        header["__metadata__"]["penstock.form"] = json.dumps(mutate(form, generator, FORMS))
    else:
        header = mutate(header, generator, [[0, 2**62], [0.0, 48.0], "stacked", "separate", "one", [1] * 80])
    text = json.dumps(header).encode()
    values = bytearray(body[end:])
    if generator.random() < 0.2:
        values[generator.randrange(len(values))] ^= 1 << generator.randrange(8)  # an offset, perhaps
    return len(text).to_bytes(8, "little") + text + values


FORMS = [{"tensor": "x"}, {"tensor": "y.offsets"}, {"ragged": "x"}, {"raw": "x"}, {"dict": {"a": {"tensor": "x"}}}]


def use(body: bytes, plan: penstock.Plan, item: Item | Bundle) -> None:
    """What the client does with a body, and a training loop with its batches."""
    pool = SlotPool(private_slot)
    slot = pool.take()
    slot.memory(len(body))[: len(body)] = body
    reader = AnswerReader(plan)
    reader.read(slot, len(body), item, 0.0)
    arrived = reader.read(slot, len(body), item, 0.0)  # now that its header is known
    batches = arrived.cut(pool.hand_over(slot, arrived.layout))
    assert len(batches) == arrived.num_batches
    for value in itertools.chain.from_iterable(batch.values() for batch in batches):
        if isinstance(value, np.ndarray):
            value.sum()
        elif isinstance(value, Ragged):
            assert sum(map(len, value)) <= len(value.values)


@pytest.mark.parametrize(
    "num_examples", [pytest.param(200, id="short"), pytest.param(20_000, id="long", marks=pytest.mark.stress)]
)
@pytest.mark.parametrize("arrangement", ["one", "stacked", "separate"])
@pytest.mark.timeout(900)
def test_a_forged_answer_is_used_or_refused_by_an_error_of_ours(
    arrangement: str, num_examples: int, plan: penstock.Plan, honest: Addressed
) -> None:
    if arrangement == "stacked":
        rectangular = penstock.from_arrays({"x": np.arange(600).reshape(100, 6)}).batch(10)
        with serve(rectangular, "127.0.0.1:0", num_workers=1) as server:
            body = asked(server, f"/v1/batch/{rectangular.fingerprint}/0/3/0/1/0/1")
        plan = rectangular
    else:
        body = asked(honest, f"/v1/batch/{plan.fingerprint}/0/{1 if arrangement == 'one' else 3}/0/1/0/1")
    item = Item(0) if arrangement == "one" else Bundle(0, 0, 1, 1, 3, 10, 30)
    use(body, plan, item)
    for seed in range(num_examples):
        body_of_seed = forged(body, random.Random(f"{arrangement} {seed}"))
        with naming(f"{arrangement}, seed {seed}"):
            use_or_refuse(lambda body=body_of_seed: use(body, plan, item))


def test_numbers_of_thousands_of_digits_are_refused_before_they_are_multiplied_and_quoted_short() -> None:
    long = "9" * 4299
    shape = ",".join([long] * 230)
    metadata = {"penstock.form": json.dumps({"x": {"tensor": "x"}}), "penstock.arrangement": "one"}
    text = (
        f'{{"__metadata__": {json.dumps(metadata)}, "x": {{"dtype": "U8", "shape": [SHAPE], "data_offsets": [0, 8]}}}}'
    )
    for lie in (shape, ",".join(["281474976710655"] * 50_000)):
        head = text.replace("SHAPE", lie).encode()
        body = memoryview(len(head).to_bytes(8, "little") + head + bytes(8))
        with guarded():
            for _ in range(6):  # as often as a loader asks again
                with pytest.raises(FormatError) as raised:
                    decode(body)
        assert len(str(raised.value)) < 500


def body_of(batch: dict[str, Any]) -> bytes:
    return b"".join(encode(batch, "one").buffers)


def answers_with(body: bytes, honest: Addressed, asked_for: list[str]) -> Answer:
    """The honest server's page, and this body for every batch."""
    page = http(asked(honest, "/v1/plan"))

    def answer(path: str) -> bytes:
        if path == "/v1/plan":
            return page
        asked_for.append(path)
        return signed(body)

    return answer


OTHER_BATCHES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "fewer rows": {"x": np.zeros((9, 600), np.int64), "y": Ragged.from_lengths(np.arange(27), [3] * 9)},
    "more rows": {"x": np.zeros((11, 600), np.int64), "y": Ragged.from_lengths(np.arange(33), [3] * 11)},
    "one column of fewer rows": {"x": np.zeros((10, 600), np.int64), "y": Ragged.from_lengths(np.arange(27), [3] * 9)},
    "a column of another shape": {
        "x": np.zeros((10, 599), np.int64),
        "y": Ragged.from_lengths(np.arange(30), [3] * 10),
    },
    "a column of another type": {"x": np.zeros((10, 600), np.int32), "y": Ragged.from_lengths(np.arange(30), [3] * 10)},
    "a column less": {"y": Ragged.from_lengths(np.arange(30), [3] * 10)},
}


@pytest.mark.parametrize("batch", OTHER_BATCHES.values(), ids=OTHER_BATCHES)
def test_an_answer_without_the_rows_asked_for_is_refused(
    batch: dict[str, Any], plan: penstock.Plan, honest: Addressed
) -> None:
    with (
        liar(answers_with(body_of(batch), honest, [])) as address,
        pytest.raises(FormatError, match="does not hold the rows asked for"),
    ):
        load(plan, address)


def deep_bodies() -> dict[str, bytes]:
    """Bodies whose JSON is nested 900 deep: deep enough for some of Python's own functions to fail, not for others."""
    tensor = np.zeros(8, np.uint8)
    plain = body_of({"x": tensor})
    end = 8 + int.from_bytes(plain[:8], "little")
    found = {}
    for name, form in {
        "lists": '{"list":[' * 900 + '{"tensor":"x"}' + "]}" * 900,
        "dicts": '{"dict":{"a":' * 900 + '{"tensor":"x"}' + "}}" * 900,
        "values": '{"json":' + "[" * 900 + "]" * 900 + "}",
    }.items():
        header = json.loads(plain[8:end])
        header["__metadata__"]["penstock.form"] = '{"x":' + form + "}"
        text = json.dumps(header).encode()
        found[name] = len(text).to_bytes(8, "little") + text + tensor.tobytes()
    deep = ('{"__metadata__":' + '{"a":' * 900 + "1" + "}" * 900 + "}").encode()
    return found | {"header": len(deep).to_bytes(8, "little") + deep}


@pytest.mark.parametrize("name", ["lists", "dicts", "values", "header"])
def test_an_answer_nested_deeply_is_refused_and_not_waited_for_until_the_time_limit(
    name: str, plan: penstock.Plan, honest: Addressed
) -> None:
    with liar(answers_with(deep_bodies()[name], honest, [])) as address, pytest.raises(FormatError, match="answer"):
        load(plan, address)


def test_a_damaged_answer_is_asked_for_again_after_a_pause_and_never_after_the_error(
    plan: penstock.Plan, honest: Addressed, caplog: pytest.LogCaptureFixture
) -> None:
    asked_for: list[str] = []
    with (
        liar(answers_with(b"x" * 100, honest, asked_for)) as address,
        penstock.DataLoader(plan, remote=Remote(servers=address, timeout_seconds=60.0), prefetch=4) as loader,
    ):
        begin = time.monotonic()
        with pytest.raises(FormatError):
            next(iter(loader))
        assert time.monotonic() - begin > 1.0
        time.sleep(0.2)  # for answers on their way
        num_asked, num_logged = len(asked_for), len(caplog.records)
        time.sleep(2.0)
        assert (len(asked_for), len(caplog.records)) == (num_asked, num_logged)
        with pytest.raises(FormatError):
            next(iter(loader))
        assert len(asked_for) > num_asked


def test_a_token_is_not_shown_without_tls_beyond_loopback(plan: penstock.Plan, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a secret of many characters")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"0.0.0.0:{listener.getsockname()[1]}"  # this machine, though no address of its loopback
        security = Security(token_file=tmp_path / "token")
        with pytest.raises(ServiceError, match=r"would get the token .* authority="):
            penstock.DataLoader(plan, remote=Remote(servers=address, security=security)).__iter__()
        (reading,) = read_servers([address], security)
        assert "authority=" in str(reading.problem)
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_a_list_of_servers_that_makes_no_sense_for_a_while_leaves_the_last_one(
    plan: penstock.Plan, honest: Addressed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr("penstock.service._client._RESOLVE_SECONDS", 0.05)
    listed = tmp_path / "servers"
    listed.write_text(honest.address)
    with penstock.DataLoader(plan, remote=listed) as loader, caplog.at_level(logging.WARNING):
        batches = iter(loader)
        next(batches)
        listed.write_text(f"no address {ESCAPE}")
        assert wait_until(lambda: len(caplog.records) > 1)
        assert len(list(batches)) == 9
    assert ESCAPE not in caplog.text
    with pytest.raises(ValueError, match="is not an address"):
        penstock.DataLoader(plan, remote=listed).__iter__()


NO_ADDRESSES = {
    "http://user:hunter2@127.0.0.1:9": "'…@127.0.0.1:9' is not an address",
    "user:hunter2@127.0.0.1:9": "'…@127.0.0.1:9' is not an address",
    "file:///etc/passwd": "'file:///etc/passwd' is not an address",
    "127.0.0.1:\uff11\uff12": "is not an address",
    "127.0.0.1:" + "9" * 5000: "is not an address",
    "\u202ehost:9": "is not an address",
    "\ud800:9": "is not an address",
    "..:9": "'..:9' is not an address",
    "a" * 64 + ":9": "is not an address",
    "127.0.0.1:9\r\nX: y": "is not an address",
    "/dev/zero": "/dev/zero is not a regular file",
}


@pytest.mark.parametrize(("servers", "expected"), NO_ADDRESSES.items())
def test_what_is_no_address_is_refused_at_once_and_no_password_is_shown(
    servers: str, expected: str, plan: penstock.Plan
) -> None:
    with pytest.raises(ValueError, match=re.escape(expected)) as raised:
        iter(penstock.DataLoader(plan, remote=servers))
    assert "hunter2" not in str(raised.value)
    assert len(str(raised.value)) < 300


def test_a_list_is_of_texts_and_of_a_thousand_servers_at_most(plan: penstock.Plan, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="3 is not an address"):
        iter(penstock.DataLoader(plan, remote=[3]))  # type: ignore[list-item]
    listed = tmp_path / "servers"
    listed.write_text("".join(f"127.0.{number >> 8}.{number & 255}:9\n" for number in range(2000)))
    num_threads = threading.active_count()
    with pytest.raises(ValueError, match=r"over 1,024 servers"):
        iter(penstock.DataLoader(plan, remote=listed))
    listed.write_text("127.0.0.1:9\n" * 100_000)
    with pytest.raises(FormatError, match=r"1,200,000 bytes; 1,048,576 is the limit"):
        iter(penstock.DataLoader(plan, remote=listed))
    assert threading.active_count() == num_threads


def test_what_a_server_says_is_safe_to_print_in_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    with liar(lambda _: as_json({"error": ESCAPE}, "403 Forbidden")) as address:
        assert main(["top", address]) == 1
    shown = capsys.readouterr().out
    assert "\\x1b" in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize("page", [b"penstock_workers nan\n", b"penstock_workers\n", b"penstock_a{b=1} 5 6\n"])
def test_metrics_that_make_no_sense_are_a_problem_of_that_server(
    page: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    with liar(lambda _: http(page)) as address:
        assert main(["top", address, "--json"]) == 1
    (reading,) = json.loads(capsys.readouterr().out)
    assert reading["problem"]


def test_metrics_do_not_stand_for_the_server_that_sent_them(capsys: pytest.CaptureFixture[str]) -> None:
    with liar(lambda _: http(b"penstock_server 1\npenstock_problem 2\n")) as address:
        assert main(["top", address, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"server": address, "problem": None}]

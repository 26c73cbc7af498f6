"""A loader whose workers are servers: the same batches, order and state as with workers of its own."""

from __future__ import annotations

import contextlib
import hmac
import http.client
import json
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import penstock
from penstock.errors import RemoteFailed, ServiceError
from penstock.service import make_certificates, serve
from penstock.service._settings import is_token

pytestmark = pytest.mark.usefixtures("lasting_fork_servers")


def scaled(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"x": row["x"].astype(np.float32) * rng.random(dtype=np.float32)}


def failing(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    if row["x"][0] == 36:
        raise ValueError("sample 9 is bad")
    return row


def nested(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    number = int(row["x"][0])
    return {"b": b"%03d" % number, "n": {"y": row["x"] + 1}, "l": [row["x"], row["x"] * 2]}


def slow_at_first(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    if row["x"][0] == 0:
        time.sleep(2)
    return row


def documents(lengths: Sequence[int]) -> penstock.Dataset:
    return penstock.from_arrays({"tokens": penstock.Ragged.from_lengths(np.arange(sum(lengths)), list(lengths))})


def samples(count: int = 100) -> penstock.Dataset:
    return penstock.from_arrays({"x": np.arange(count * 4, dtype=np.int32).reshape(count, 4)})


PLANS = {
    "plain": lambda: samples().shuffle(seed=1).batch(8),
    "short tail": lambda: samples().shuffle(seed=1).batch(8, tail="short"),
    "even tail": lambda: samples().batch(8, tail="even"),
    "by tokens": lambda: documents(range(40)).shuffle(seed=1).pad().batch(tokens=512, multiple=8, balance="attention"),
    "mapped": lambda: samples().shuffle(seed=2).map(scaled).batch(8),
    "nested": lambda: samples().shuffle(seed=2).map(nested).batch(8),
    "packed": lambda: (
        penstock.from_arrays(
            {"tokens": penstock.Ragged.from_lengths(np.arange(4950, dtype=np.uint16), list(range(100)))}
        )
        .shuffle(seed=3)
        .pack(64)
        .batch(4)
    ),
    "ragged": lambda: penstock.from_arrays(
        {"t": penstock.Ragged.from_lengths(np.arange(4950, dtype=np.uint16), list(range(100)))}
    ).batch(4),
}


@contextlib.contextmanager
def served(plan: penstock.Plan, count: int = 1, **options: Any) -> Iterator[list[str]]:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(serve(plan, "127.0.0.1:0", num_workers=1, **options)) for _ in range(count)]
        yield [server.address for server in servers]


def same(left: Any, right: Any) -> bool:
    if isinstance(right, penstock.Ragged):
        return same(left.values, right.values) and same(left.offsets, right.offsets)
    if isinstance(right, (np.ndarray, torch.Tensor)):
        return bool(torch.equal(torch.as_tensor(left), torch.as_tensor(right)))
    if isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in right)
    if isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def assert_same_batches(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(same(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("name", PLANS)
def test_servers_give_the_batches_that_workers_give(name: str) -> None:
    plan = PLANS[name]()
    with served(plan, 2) as servers:
        for options in ({}, {"rank": 1, "world_size": 2}, {"micro_batch": 2}, {"local_workers": 1}):
            here = list(
                penstock.DataLoader(plan, num_workers=0, **{k: v for k, v in options.items() if k != "local_workers"})
            )
            with penstock.DataLoader(plan, remote=servers, **options) as loader:
                assert_same_batches(list(loader), here)


def test_a_state_saved_with_servers_goes_on_without_them_and_back() -> None:
    plan = PLANS["mapped"]()
    expected = list(penstock.DataLoader(plan, num_workers=0))
    with served(plan) as servers, penstock.DataLoader(plan, remote=servers) as loader:
        batches = iter(loader)
        found = [next(batches) for _ in range(5)]
        state = loader.state_dict()
        here = penstock.DataLoader(plan, num_workers=0)
        here.load_state_dict(state)
        assert_same_batches(found + list(here), expected)
        loader.load_state_dict(state)
        assert_same_batches(found + list(loader), expected)


def test_small_batches_travel_several_at_a_time() -> None:
    plan = samples(4096).shuffle(seed=1).batch(8)
    with (
        serve(plan, "127.0.0.1:0", num_workers=1) as server,
        penstock.DataLoader(plan, remote=server.address) as loader,
    ):
        assert len(list(loader)) == 512
        while server.statistics.num_waiting:  # the last is counted when it is gone
            time.sleep(0.01)
        assert server.statistics.num_answers < 20  # 1, 2, 4, … steps at a time
        assert server.statistics.num_steps >= 512


def costly(row: dict[str, Any]) -> dict[str, Any]:
    time.sleep(0.005)
    return row


def test_batches_that_take_long_travel_alone_however_small_they_are() -> None:
    plan = samples(64).map(costly).batch(16)
    with (
        serve(plan, "127.0.0.1:0", num_workers=1) as server,
        penstock.DataLoader(plan, remote=server.address) as loader,
    ):
        assert len(list(loader)) == 4
        while server.statistics.num_waiting:
            time.sleep(0.01)
        assert server.statistics.num_answers >= 4


def test_a_slow_batch_holds_up_no_others_of_its_server_where_order_does_not_matter() -> None:
    plan = samples().map(slow_at_first).batch(4)
    with serve(plan, "127.0.0.1:0", num_workers=2) as server:
        options = {"in_order": False, "prefetch": 4}
        with penstock.DataLoader(plan, remote=[server.address], **options) as loader:
            rows = [int(batch["x"][0, 0]) for batch in loader]
    assert rows[0] != 0
    assert sorted(rows) == list(range(0, 400, 16))


def test_what_two_ask_for_is_computed_once() -> None:
    plan = samples().batch(10)
    with serve(plan, "127.0.0.1:0", num_workers=1) as server:
        for _ in range(3):
            with penstock.DataLoader(plan, remote=server.address) as loader:
                assert len(list(loader)) == 10
        statistics = server._dispatcher.statistics
        assert statistics.num_shared >= 2 * (statistics.num_computed - 1)


def test_an_error_in_a_mapped_function_arrives_with_its_traceback() -> None:
    plan = samples().map(failing).batch(2)
    with served(plan, 2) as servers, penstock.DataLoader(plan, remote=servers, prefetch=2) as loader:
        batches = iter(loader)
        for _ in range(4):
            next(batches)
        with pytest.raises(RemoteFailed, match=r"(?s)sample 9 is bad.*in failing"):
            next(batches)


def test_no_server_is_an_error_that_names_each_with_its_reason() -> None:
    plan = samples().batch(2)
    remote = penstock.Remote(servers=["127.0.0.1:1", "localhost:2"], timeout_seconds=0.5)
    with pytest.raises(ServiceError, match=r"(?s)No server has answered.*127\.0\.0\.1:1: nothing listens.*:2: nothing"):
        next(iter(penstock.DataLoader(plan, remote=remote)))


def test_a_server_of_another_plan_is_refused_at_once() -> None:
    plan = samples().batch(2)
    reason = f"(?s)Every server refuses.*not {plan.fingerprint}"
    with served(samples().batch(4)) as servers, pytest.raises(ServiceError, match=reason):
        next(iter(penstock.DataLoader(plan, remote=servers)))


def test_with_workers_here_no_server_means_slower_not_stopped() -> None:
    plan = samples().batch(10)
    remote = penstock.Remote(servers=["127.0.0.1:1"], timeout_seconds=0.5)
    with penstock.DataLoader(plan, remote=remote, local_workers=1) as loader:
        assert_same_batches(list(loader), list(penstock.DataLoader(plan, num_workers=0)))


def test_servers_in_a_file_come_and_go(tmp_path: Path) -> None:
    plan = samples(400).batch(2)
    listed = tmp_path / "servers"
    expected = list(penstock.DataLoader(plan, num_workers=0))
    with served(plan) as first, served(plan) as second:
        listed.write_text(f"# the old one\n{first[0]}\n")
        with penstock.DataLoader(plan, remote=listed, prefetch=4) as loader:
            batches = iter(loader)
            found = [next(batches) for _ in range(50)]
            listed.write_text(f"{second[0]}\n")
            assert_same_batches(found + list(batches), expected)


def test_a_token_is_asked_for_and_compared(tmp_path: Path) -> None:
    plan = samples().batch(10)
    (tmp_path / "token").write_text("a secret of many characters\n")
    (tmp_path / "wrong").write_text("another one of many characters\n")
    with served(plan, security=penstock.Security(token_file=tmp_path / "token")) as servers:
        for name, fits in (("token", True), ("wrong", False), (None, False)):
            security = penstock.Security(token_file=tmp_path / name if name else None)
            loader = penstock.DataLoader(plan, remote=penstock.Remote(servers=servers, security=security))
            if fits:
                assert len(list(loader)) == 10
                loader.close()
            else:
                with pytest.raises(ServiceError, match=r"401: The token is missing or wrong\.\nShow the servers"):
                    list(loader)


def test_a_token_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No times are measured: what comparing 40 bytes takes is a thousandth of a network's noise.

    `hmac.compare_digest` looks at every byte, wherever the first difference is; only the length shows. Whatever is
    shown must go through it, and its answer be the server's.
    """
    secret, seen = "a secret of many characters", []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda *pair: seen.append(pair) or real(*pair))
    shown = [f"Bearer {secret}", f"Bearer {secret[:-1]}x", "Bearer x" + secret[1:], secret, "", None, "Bearer \udcff"]
    assert [is_token(each, secret) for each in shown] == [True] + [False] * 6
    assert [ours for _, ours in seen] == [f"Bearer {secret}".encode()] * len(shown)


def test_a_port_that_is_taken_and_no_workers_are_told() -> None:
    plan = samples().batch(10)
    with served(plan) as servers, pytest.raises(OSError, match=f"Address already in use: '{servers[0]}'"):
        penstock.serve(plan, servers[0], num_workers=1)
    for number in (0, -1):
        with pytest.raises(ValueError, match=f"num_workers={number}: a server needs at least one"):
            penstock.serve(plan, "127.0.0.1:0", num_workers=number)


def test_certificates_made_for_a_cluster_let_its_own_in_and_others_out(tmp_path: Path) -> None:
    plan = samples().batch(10)
    files, others = (make_certificates(tmp_path / name, ["127.0.0.1", "localhost"]) for name in ("ours", "theirs"))
    security = penstock.Security(certificate=files.server[0], key=files.server[1], authority=files.authority)
    ours = penstock.Security(certificate=files.client[0], key=files.client[1], authority=files.authority)
    theirs = penstock.Security(certificate=others.client[0], key=others.client[1], authority=files.authority)
    assert files.server[1].stat().st_mode & 0o077 == 0
    with served(plan, security=security) as servers:
        with penstock.DataLoader(plan, remote=penstock.Remote(servers=servers, security=ours)) as loader:
            assert len(list(loader)) == 10
        for wrong in (theirs, penstock.Security(authority=files.authority), penstock.Security()):
            remote = penstock.Remote(servers=servers, security=wrong, timeout_seconds=1)
            with pytest.raises(ServiceError, match="No server has answered"):
                list(penstock.DataLoader(plan, remote=remote))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "cpu1"])
def test_beyond_loopback_a_server_wants_tls_and_a_secret(host: str, tmp_path: Path) -> None:
    plan = samples().batch(10)
    files = make_certificates(tmp_path, ["cpu1"])
    bind = f"[{host}]:0" if ":" in host else f"{host}:0"
    with pytest.raises(ValueError, match="needs TLS"):
        penstock.serve(plan, bind)
    with pytest.raises(ValueError, match="token_file="):
        penstock.serve(plan, bind, security=penstock.Security(certificate=files.server[0], key=files.server[1]))


def test_a_torch_dataset_is_not_served_and_the_message_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"servers compute plans.*penstock\.prepare"):
        penstock.DataLoader(range(10), remote=["cpu1:8815"])


def get(address: str, path: str, **headers: str) -> tuple[int, bytes]:
    host, _, port = address.rpartition(":")
    with contextlib.closing(http.client.HTTPConnection(host, int(port), timeout=10)) as connection:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read()


def test_pages_for_people_and_monitoring_are_there() -> None:
    plan = samples().batch(10)
    with served(plan) as (address,):
        assert get(address, "/healthz") == (200, b"ok\n")
        assert json.loads(get(address, "/v1/plan")[1])["fingerprint"] == plan.fingerprint
        assert b"\npenstock_workers 1\n" in get(address, "/metrics")[1]
        assert get(address, "/etc/passwd")[0] == 404
        for path in (
            "/v1/batch/x",
            f"/v1/batch/{plan.fingerprint}/0/9999999/0/1/0/1",
            f"/v1/batch/{plan.fingerprint}/0/1/0/3/0/1",
        ):
            assert get(address, path)[0] == 400
        assert get(address, "/v1/batch/other/0/1/0/1/0/1")[0] == 409


def test_a_connection_that_says_nothing_is_closed() -> None:
    with served(samples().batch(10)) as (address,):
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=20) as silent:
            assert silent.recv(1) == b""


def test_workers_that_cannot_be_set_up_are_an_error_of_serve_and_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    here_only = ModuleType("here_only")
    exec("def same(row, rng):\n    return row\n", vars(here_only))
    monkeypatch.setitem(sys.modules, "here_only", here_only)
    with pytest.raises(ModuleNotFoundError, match=r"here_only.*\n*while worker process 0 was being set up"):
        penstock.serve(samples().map(here_only.same).batch(8), "127.0.0.1:0", num_workers=1)


def test_a_secret_that_all_users_can_change_is_refused_and_one_they_can_read_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token = tmp_path / "token"
    token.write_text("a secret of many characters")
    ours, theirs = (make_certificates(tmp_path / name, ["127.0.0.1"]) for name in ("ours", "theirs"))
    server = penstock.Security(certificate=ours.server[0], key=ours.server[1])
    client = penstock.Security(certificate=theirs.client[0], key=theirs.client[1], authority=theirs.authority)
    for secret, use in (
        (token, lambda: penstock.Security(token_file=token).token),
        (ours.server[1], server.server_context),
        (theirs.client[1], client.client_context),
    ):
        for mode, num_told in ((0o600, 0), (0o640, 0), (0o644, 1)):
            secret.chmod(mode)
            caplog.clear()
            assert use()
            assert [f"{secret}: every user of this machine can read" in each for each in caplog.messages] == (
                [True] * num_told
            )
        secret.chmod(0o602)
        with pytest.raises(ValueError, match=f"{secret}: every user of this machine can change this secret. chmod 600"):
            use()
        secret.chmod(0o600)


def test_a_secret_that_all_users_can_replace_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shared, token = tmp_path / "shared", tmp_path / "shared" / "own" / "token"
    files = make_certificates(token.parent, ["127.0.0.1"])
    token.write_text("a secret of many characters")
    token.chmod(0o600)
    certificate, key = files.server
    for use in (
        lambda: penstock.Security(token_file=token).token,
        penstock.Security(certificate=certificate, key=key).server_context,
    ):
        for folder in (token.parent, shared):
            for mode, num_told in ((0o777, 1), (0o1777, 0), (0o755, 0)):  # in /tmp only its owner can replace an entry
                folder.chmod(mode)
                caplog.clear()
                assert use()
                assert [each.endswith(f"can replace this secret. chmod o-w {folder}") for each in caplog.messages] == (
                    [True] * num_told
                )


def fail_to_reach(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    if row["x"][0] >= 40:
        raise TimeoutError("the store does not answer")
    return row


def test_a_mapped_function_that_waits_in_vain_is_a_failure_of_its_own_and_not_of_the_reader() -> None:
    plan = samples().map(fail_to_reach).batch(10)
    with served(plan) as servers, pytest.raises(RemoteFailed, match="TimeoutError: the store does not answer"):
        list(penstock.DataLoader(plan, remote=servers))

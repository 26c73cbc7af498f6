"""Where little is allowed and much goes wrong: few open files, no home, no /proc, clients by the dozen, kills."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import penstock
from penstock.service import Remote, Security, make_certificates, serve
from waiting import wait_until

from .processes import ServeProcess, written_plan


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written_plan(tmp_path_factory.mktemp("plan"))


def start(command: list[str], plan_file: Path, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """`penstock serve`, behind a command that takes something away from it."""
    options = ["--bind", "127.0.0.1:0", "--workers", "1", "--json"]
    serving = [sys.executable, "-m", "penstock.cli", "serve", os.fspath(plan_file), *options]
    return subprocess.Popen([*command, *serving], stdout=subprocess.PIPE, text=True, env=environment)


@contextlib.contextmanager
def address_of(process: subprocess.Popen[str]) -> Iterator[str]:
    with process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["address"]
        finally:
            process.kill()


def assert_gives_batches(address: str, plan: penstock.Plan, count: int = 8) -> None:
    with penstock.DataLoader(plan, remote=Remote(servers=address, timeout_seconds=60.0)) as loader:
        for step, batch in enumerate(itertools.islice(loader, count)):
            assert np.array_equal(batch["x"], plan.read(step)["x"])


def connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=60)


def test_a_server_that_may_open_few_files_serves_while_strangers_take_what_they_can(plan_file: Path) -> None:
    plan = penstock.load_plan(plan_file)
    with (
        address_of(start(["sh", "-c", 'ulimit -n 64; exec "$@"', "sh"], plan_file)) as address,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(200):
            with contextlib.suppress(OSError):
                talker = stack.enter_context(connected(address))
                talker.sendall(b"GET /v1/plan HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
                talker.recv(1000)
        assert_gives_batches(address, plan)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may unmount /proc for one process")
def test_a_server_without_proc_and_without_a_home_serves(plan_file: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")}
    hide = ["unshare", "--mount", "sh", "-c", 'umount -l /proc && exec "$@"', "sh"]
    if subprocess.run([*hide, "true"], check=False, capture_output=True).returncode:
        pytest.skip("mounts cannot be changed here")
    with address_of(start(hide, plan_file, environment)) as address:
        assert_gives_batches(address, penstock.load_plan(plan_file))


def test_clients_without_a_certificate_of_the_authority_are_turned_away(plan_file: Path, tmp_path: Path) -> None:
    ours, others = (make_certificates(tmp_path / name, ["127.0.0.1"]) for name in ("ours", "others"))
    plan = penstock.load_plan(plan_file)
    there = Security(certificate=ours.server[0], key=ours.server[1], authority=ours.authority)
    with serve(plan, "127.0.0.1:0", num_workers=1, security=there) as server:
        host, _, port = server.address.rpartition(":")
        shown: dict[str, tuple[Path, Path] | None] = {
            "none": None,
            "another authority's": others.client,
            "a server's": ours.server,
            "a client's": ours.client,
        }
        found = {}
        for name, pair in shown.items():
            context = ssl.create_default_context(cafile=ours.authority)
            if pair is not None:
                context.load_cert_chain(*pair)
            found[name] = _ask(context, host, int(port))
        assert found == {"none": False, "another authority's": False, "a server's": False, "a client's": True}
        old = ssl.create_default_context(cafile=ours.authority)
        old.load_cert_chain(*ours.client)
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        assert not _ask(old, host, int(port))
        not_ours = Security(certificate=ours.client[0], key=ours.client[1], authority=others.authority)
        loader = penstock.DataLoader(
            plan, remote=Remote(servers=server.address, security=not_ours, timeout_seconds=2.0)
        )
        with pytest.raises(penstock.errors.ServiceError, match="certificate"):
            iter(loader)


def _ask(context: ssl.SSLContext, host: str, port: int) -> bool:
    """Whether the server answers at all."""
    try:
        with (
            socket.create_connection((host, port), timeout=20) as raw,
            context.wrap_socket(raw, server_hostname=host) as asking,
        ):
            asking.sendall(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            return asking.recv(100).startswith(b"HTTP/1.1 200")
    except OSError:
        return False


def test_a_first_header_that_comes_drop_by_drop_ends_in_time(plan_file: Path) -> None:
    with (
        serve(penstock.load_plan(plan_file), "127.0.0.1:0", num_workers=1) as server,
        connected(server.address) as stranger,
    ):
        stranger.sendall(b"GET /v1/plan HTTP/1.1\r\nX: ")

        def is_over() -> bool:
            try:
                stranger.sendall(b"x")
            except OSError:
                return True
            return False

        assert wait_until(is_over, 20.0)


def test_metrics_and_pages_give_away_nothing_of_the_machine(plan_file: Path) -> None:
    with serve(penstock.load_plan(plan_file), "127.0.0.1:0", num_workers=1) as server:
        for path in ("/metrics", "/v1/plan", "/healthz", "/none"):
            with connected(server.address) as asking:
                asking.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
                page = b"".join(iter(lambda asking=asking: asking.recv(65536), b"")).decode()
            for secret in (os.fspath(plan_file.parent), socket.gethostname(), sys.executable, str(os.getpid())):
                body = page.partition("\r\n\r\n")[2]  # a process id may well be a part of some other number
                assert re.search(rf"(?<![0-9]){re.escape(secret)}(?![0-9])", body) is None, path


@pytest.mark.stress
@pytest.mark.timeout(600)
def test_64_clients_of_one_server_all_get_their_batches(plan_file: Path) -> None:
    plan = penstock.load_plan(plan_file)
    with ServeProcess(plan_file) as server:
        begin = time.monotonic()
        with ThreadPoolExecutor(64) as clients:
            for done in [clients.submit(assert_gives_batches, server.address, plan, 16) for _ in range(64)]:
                done.result()
        print(f"64 clients, 16 batches each: {time.monotonic() - begin:.1f} s, server at {server.memory_mib():.0f} MiB")


@pytest.mark.stress
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", ["server", "worker", "fork server"])
def test_50_kills_lose_no_batch(victim: str, plan_file: Path) -> None:
    plan = penstock.load_plan(plan_file)
    with ServeProcess(plan_file) as server:
        remote = Remote(servers=server.address, timeout_seconds=60.0)
        with penstock.DataLoader(plan, remote=remote, prefetch=4) as loader:
            steps: Any = itertools.chain.from_iterable(
                zip(itertools.repeat(epoch), range(len(loader)), loader, strict=False) for epoch in itertools.count()
            )
            for _ in range(50):
                _kill(victim, server)
                for epoch, step, batch in itertools.islice(steps, 40):
                    assert np.array_equal(batch["x"], plan.read(step, epoch)["x"])


def _kill(victim: str, server: ServeProcess) -> None:
    if victim == "server":
        server.kill()
        server.start()
        return
    assert wait_until(lambda: bool(psutil.Process(server.pid).children(recursive=True)))
    (fork_server, *_) = psutil.Process(server.pid).children()
    victims = [fork_server] if victim == "fork server" else fork_server.children()
    for process in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)

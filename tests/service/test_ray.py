"""Servers on a Ray cluster: placed, lost, and found again at another address."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

import penstock
from penstock.cli import main
from penstock.errors import MissingExtra
from penstock.service import RayServers


def make_plan(folder: Path) -> Path:
    """A plan file over a dataset on disk, as every machine of a cluster would see it."""
    with penstock.DatasetWriter(folder / "data", {"x": "int64"}) as writer:
        writer.write_batch({"x": np.arange(40_000)})
    plan = penstock.open(folder / "data").shuffle(seed=3).batch(4)
    (folder / "plan.toml").write_text(plan.to_toml())
    return folder / "plan.toml"


def test_without_ray_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    plan = penstock.load_plan(make_plan(tmp_path))
    with pytest.raises(MissingExtra, match=r"pip install 'penstock-data\[ray\]'"):
        RayServers(plan, tmp_path / "servers.txt", 2)
    assert not (tmp_path / "servers.txt").exists()


def test_beyond_loopback_they_need_what_every_server_needs(tmp_path):
    plan = penstock.load_plan(make_plan(tmp_path))
    with pytest.raises(ValueError, match="TLS"):
        RayServers(plan, tmp_path / "servers.txt", 2, bind="0.0.0.0:0")


def test_no_servers_are_refused_and_the_signals_are_given_back(tmp_path, capsys):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert main(["serve", str(make_plan(tmp_path)), "--ray", "0"]) == 1
    assert "0 servers; expected at least 1." in capsys.readouterr().err
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.stress
@pytest.mark.filterwarnings("ignore")  # Ray's own
class TestOnALocalCluster:
    @pytest.fixture(autouse=True)
    def cluster(self) -> Iterator[None]:
        ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'penstock-data[ray]'")
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()

    @pytest.mark.timeout(300)
    def test_a_killed_server_is_found_again_at_another_address_and_no_batch_is_lost(self, tmp_path):
        plan = penstock.load_plan(make_plan(tmp_path))
        file, is_over = tmp_path / "servers.txt", threading.Event()
        with RayServers(plan, file, 2, num_workers=1) as servers:
            watching = threading.Thread(target=servers.watch, args=[is_over.is_set])
            watching.start()
            try:
                before = wait_for_two(file)
                with penstock.DataLoader(plan, remote=file) as loader:
                    for step, batch in enumerate(loader):
                        assert np.array_equal(batch["x"], plan.read(step)["x"])
                        if step == 500:
                            lost = kill_one(before)
                            killed_at = time.monotonic()
                after = wait_for_two(file, without=lost)
                print(f"two again {time.monotonic() - killed_at:.1f} s after one was killed")
                assert len(after) == 2
            finally:
                is_over.set()
                watching.join()
        assert not file.exists()


def wait_for_two(file: Path, without: str | None = None) -> list[str]:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        addresses = file.read_text().splitlines() if file.exists() else []
        if len(addresses) == 2 and without not in addresses:
            return addresses
        time.sleep(0.2)
    raise AssertionError(f"{file} still says {addresses}")


def kill_one(addresses: list[str]) -> str:
    """Kill the process that listens at the first address, and say which address that was."""
    port = int(addresses[0].rpartition(":")[2])
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
            os.kill(connection.pid, signal.SIGKILL)
            return addresses[0]
    raise AssertionError(f"nobody listens at {addresses[0]}")

"""A real network between two namespaces, cut and mended while a loader is fed over it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.service import make_certificates

from .processes import written_plan

HERE, THERE = "10.213.77.1", "10.213.77.2"
TRAIN = """
import sys, time, numpy as np, penstock

plan, address, keys, steps = sys.argv[1:]
plan = penstock.load_plan(plan)
security = penstock.Security(token_file=f"{keys}/token", authority=f"{keys}/authority.pem")
longest = 0.0
remote = penstock.Remote(servers=address, security=security, timeout_seconds=60)
with penstock.DataLoader(plan, remote=remote, epochs=None) as loader:
    begin = time.monotonic()
    for step, batch in enumerate(loader):
        longest = max(longest, time.monotonic() - begin)
        epoch, place = divmod(step, plan.num_batches())
        assert np.array_equal(batch["x"], plan.read(place, epoch)["x"]), step
        print(step, flush=True)
        time.sleep(0.005)
        if step == int(steps):
            break
        begin = time.monotonic()
print("longest wait", longest)
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def network() -> Iterator[tuple[str, str]]:
    """Two namespaces with a cable between them; the names of both, `cable` being the device in each."""
    names = (f"penstock-{os.getpid()}-here", f"penstock-{os.getpid()}-there")
    if shutil.which("ip") is None:
        pytest.skip("needs the command ip (Debian: iproute2)")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("-n", names[0], "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, address in zip(names, (HERE, THERE), strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-n", name, "link", "set", device, "up")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this kernel or user may not make network namespaces: {error.stderr!r}")
    else:
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@pytest.mark.stress
@pytest.mark.timeout(300)
def test_a_cable_that_is_pulled_and_put_back_costs_no_batch(network: tuple[str, str], tmp_path: Path) -> None:
    here, there = network
    plan = written_plan(tmp_path)
    keys = make_certificates(tmp_path / "keys", [THERE])
    token = tmp_path / "keys" / "token"
    token.write_text("a secret of many characters")
    security = ["--certificate", keys.server[0], "--key", keys.server[1], "--token-file", token]
    serve = [sys.executable, "-m", "penstock.cli", "serve", plan, "--json", "--workers", "1", "--bind", f"{THERE}:8815"]
    inside = ["ip", "netns", "exec"]
    with subprocess.Popen([*inside, there, *serve, *security], stdout=subprocess.PIPE, text=True) as server:
        address = json.loads(server.stdout.readline())["address"]
        train = [sys.executable, "-c", TRAIN, plan, address, tmp_path / "keys", "3000"]
        with subprocess.Popen([*inside, here, *train], stdout=subprocess.PIPE, text=True) as trainer:
            for number, printed in enumerate(trainer.stdout):
                line = printed
                if number in (300, 1200, 2100):
                    ip("-n", there, "link", "set", "cable", "down")
                    time.sleep(3)
                    ip("-n", there, "link", "set", "cable", "up")
            assert trainer.wait() == 0
        server.terminate()
    print(line)
    assert line.startswith("longest wait")
    assert float(line.split()[-1]) > 1  # the cuts were felt

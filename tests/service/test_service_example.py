"""`examples/service` works as its README says."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "service"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to run in, with this Python's `python` and `penstock` first on the path."""
    shutil.copytree(EXAMPLE, tmp_path / "service")
    monkeypatch.chdir(tmp_path / "service")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    return tmp_path / "service"


@pytest.mark.parametrize("script", ["slurm.sbatch", "ray.sh"])
def test_the_scripts_are_sound_shell(script):
    subprocess.run(["bash", "-n", EXAMPLE / script], check=True)


@pytest.mark.stress
@pytest.mark.timeout(300)
def test_training_with_a_server_and_without(folder):
    subprocess.run(["python", "augmentation.py"], check=True)
    short = ["python", "train.py", "--steps", "5", "--step-ms", "1"]
    assert "steps a second" in subprocess.run(short, check=True, capture_output=True, text=True).stdout
    command = ["penstock", "serve", "plan.toml", "--allow-code", "augmentation", "--bind", "127.0.0.1:0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        address = json.loads(server.stdout.readline())["address"]
        fed = subprocess.run([*short, "--remote", address], check=True, capture_output=True, text=True)
        server.terminate()
        assert server.wait() == 0
    assert "steps a second" in fed.stdout


@pytest.mark.stress
@pytest.mark.timeout(300)
def test_training_with_servers_of_a_slurm_job(folder, monkeypatch):
    """With commands in the place of Slurm's that run here what they are given."""
    commands = folder / "commands"
    commands.mkdir()
    for name, script in {
        "scontrol": "echo localhost",
        "hostname": "echo localhost",
        "srun": 'shift 2; exec "$@"',
    }.items():
        (commands / name).write_text(f"#!/bin/sh\n{script}\n")
        (commands / name).chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as free:
        monkeypatch.setenv("PORT", str(free.getsockname()[1]))
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_NODELIST_HET_GROUP_0", "cpu[1-2]")
    script = ["bash", "slurm.sbatch", "--steps", "5", "--step-ms", "1"]
    done = subprocess.run(script, check=False, capture_output=True, text=True)
    assert "steps a second" in done.stdout, done.stderr


@pytest.mark.stress
@pytest.mark.timeout(600)
def test_training_with_servers_on_a_ray_cluster(folder, monkeypatch):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'penstock-data[ray]'")
    monkeypatch.setenv("SERVERS", "2")
    done = subprocess.run(["./ray.sh"], check=True, capture_output=True, text=True)
    assert "steps a second" in done.stdout
    assert not (folder / "servers.txt").exists()

"""Whoever of a job under the doctor is killed, nothing of it lives on: ranks, workers, launcher, doctor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .scripts import ENVIRONMENT
from .test_scripts_of_others import BIN, HEAD

pytest.importorskip("torch")
pytestmark = pytest.mark.stress

MARK = "JOB_OF_THIS_TEST"
TRAIN = """
import os
import torch.distributed as dist
dist.init_process_group("gloo")
for number, batch in enumerate(DataLoader(Slow(), batch_size=8, num_workers=1)):
    dist.all_reduce(batch)
    if number == 5:
        print("trains", os.getppid(), os.getpid(), flush=True)
"""


def alive(mark: str) -> dict[int, str]:
    """Processes that were started with a mark in their environment, and what they run."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:  # it ended meanwhile
            continue
    return found


@pytest.mark.timeout(180)
@pytest.mark.parametrize("victim", ["a rank", "the launcher", "the doctor"])
def test_a_job_of_torchrun_leaves_nothing_behind_when_one_of_it_is_killed(victim: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HEAD + TRAIN)
    launcher = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node=2", "train.py"]
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.cli", "doctor", "--json", "--", *launcher],
        cwd=tmp_path,
        env=ENVIRONMENT | {MARK: str(tmp_path)},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stderr is not None
        said = next(line for line in process.stderr if line.startswith("trains"))
        torchrun, rank = map(int, said.split()[1:])
        assert len(alive(str(tmp_path))) >= 6  # the doctor, the launcher, two ranks, a worker each
        os.kill({"a rank": rank, "the launcher": torchrun, "the doctor": process.pid}[victim], signal.SIGKILL)
        process.communicate(timeout=90)
        end = time.monotonic() + 60
        while (left := alive(str(tmp_path))) and time.monotonic() < end:
            time.sleep(0.1)
        assert left == {}
    finally:
        for pid in alive(str(tmp_path)):
            os.kill(pid, signal.SIGKILL)
    assert process.returncode != 0

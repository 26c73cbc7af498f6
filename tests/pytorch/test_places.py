"""Programs without standard streams, with an event loop, or with warnings that are said once: workers disturb none."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PREAMBLE = """
import asyncio, os, signal, sys, time, warnings
from pathlib import Path
import numpy as np, torch
import penstock

class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        print("sample", index)
        return index * index
"""


def run(folder: Path, body: str, redirections: str = "") -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(PREAMBLE + textwrap.dedent(body))
    command = f"exec {shlex.quote(sys.executable)} train.py {redirections}"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    return subprocess.run(
        ["sh", "-c", command], cwd=folder, capture_output=True, text=True, timeout=100, env=environment
    )


@pytest.mark.stress
@pytest.mark.parametrize(
    "redirections",
    ["<&- >&- 2>&-", "<&-", ">&-"],
)
def test_programs_without_standard_streams_load(tmp_path: Path, redirections: str) -> None:
    run(
        tmp_path,
        """
        if __name__ == "__main__":
            totals = []
            plan = penstock.from_arrays({"x": np.arange(32)}).batch(4)
            for method in ("fork", "spawn", "forkserver"):
                loader = penstock.DataLoader(Squares(), batch_size=8, num_workers=1, multiprocessing_context=method)
                totals.append(sum(batch.sum().item() for batch in loader))
                with penstock.DataLoader(plan, workers="process", num_workers=2, start_method=method) as loader:
                    totals.append(sum(batch["x"].sum().item() for batch in loader))
            Path("totals").write_text(str(totals))
        """,
        redirections,
    )
    assert (tmp_path / "totals").read_text() == str([10416, 496] * 3)


@pytest.mark.stress
def test_a_file_of_the_users_in_the_place_of_standard_input_stays_open_in_workers(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("1234")
    body = """
        file = open("data")

        class Digits(torch.utils.data.Dataset):
            def __len__(self):
                return 4

            def __getitem__(self, index):
                return int(os.pread(file.fileno(), 1, index))

        print(file.fileno(), [batch.tolist() for batch in penstock.DataLoader(Digits(), batch_size=2, num_workers=1)])
    """
    done = run(tmp_path, body, "<&-")
    assert (done.stdout, done.stderr) == ("0 [[1, 2], [3, 4]]\n", "")


@pytest.mark.stress
def test_what_nobody_reads_is_lost_when_printed_and_ends_no_worker(tmp_path: Path) -> None:
    body = """
        loader = penstock.DataLoader(Squares(), batch_size=8, num_workers=2)
        sys.stderr.write(str(sum(batch.sum().item() for batch in loader)))
    """
    assert run(tmp_path, body, ">/dev/full").stderr == "10416"


@pytest.mark.stress
def test_a_warning_of_the_training_loop_comes_once_and_not_once_an_epoch(tmp_path: Path) -> None:
    body = """
        loader = penstock.DataLoader(Squares(), batch_size=8, num_workers=2)
        for epoch in range(3):
            for batch in loader:
                warnings.warn("said once")
    """
    assert run(tmp_path, body).stderr.count("UserWarning: said once") == 1


@pytest.mark.stress
def test_a_signal_to_a_worker_does_not_reach_the_event_loop_of_the_trainer(tmp_path: Path) -> None:
    body = """
        class Pids(torch.utils.data.Dataset):
            def __len__(self):
                return 8

            def __getitem__(self, index):
                return os.getpid()

        async def train():
            told = []
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.append, "SIGTERM")
            num_batches = 0
            for batch in penstock.DataLoader(Pids(), batch_size=1, num_workers=1):
                os.kill(batch.item(), signal.SIGTERM)
                await asyncio.sleep(0.01)
                num_batches += 1
            print(num_batches, told)

        asyncio.run(train())
    """
    done = run(tmp_path, body)
    assert (done.stdout, done.stderr) == ("8 []\n", "")

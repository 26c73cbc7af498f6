"""Loaders in containers that forbid memory files, have no /proc, or little memory."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from confined import run_confined, without_memory_files
from waiting import wait_until

TRAINER = """
import sys, warnings
import numpy as np, torch
import penstock

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((300_000,), float(index))

def halve(row):
    return {"x": row["x"] // 2, "wide": np.zeros(300_000, np.float32)}

def main(lines):
    plan = penstock.from_arrays({"x": np.arange(16)}).map(halve).batch(4)
    with penstock.DataLoader(plan, workers="process", num_workers=1) as loader:  # it imports torch with this script
        assert [batch["x"].tolist() for batch in loader] == [plan.read(step)["x"].tolist() for step in range(4)]
    loader = penstock.DataLoader(Numbers(), batch_size=4, num_workers=2)
    assert [batch[:, 0].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    stream = penstock.stream(lines)
    loader = penstock.DataLoader(stream, batch_size=2, num_workers=1, multiprocessing_context="spawn")
    with warnings.catch_warnings(record=True) as told:
        assert [text for batch in loader for text in batch["text"]] == ["a", "b"]
    print(stream.epoch, *(str(each.message) for each in told), sep="|", flush=True)

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


def run_trainer(hows: list[str], folder: Path) -> str:
    (folder / "train.py").write_text(TRAINER)
    (folder / "lines.txt").write_text("a\nb\n")
    done = run_confined(hows, [str(folder / "train.py"), str(folder / "lines.txt")])
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.stress
def test_everything_works_where_memory_files_are_forbidden(tmp_path: Path) -> None:
    assert run_trainer([without_memory_files(errno.ENOSYS)], tmp_path) == "1"


@pytest.mark.stress
def test_without_proc_everything_works_but_counting_epochs_which_a_warning_says(tmp_path: Path) -> None:
    epoch, told = run_trainer(["/proc=0"], tmp_path).split("|")
    assert epoch == "0"
    assert told.startswith("/proc is not mounted")


EATER = """
import numpy as np
import penstock

def eat(row):
    held = []
    while row["x"] == 8:
        held.append(np.ones(1 << 22))
    return row

if __name__ == "__main__":
    plan = penstock.from_arrays({"x": np.arange(16)}).map(eat).batch(4)
    try:
        with penstock.DataLoader(plan, workers="process", num_workers=1) as loader:
            list(loader)
    except penstock.errors.WorkerDied as error:
        print(error)
"""


@pytest.fixture
def full_group() -> Iterator[Path]:
    """A control group of this kernel that may use 900 MB; skipped where it cannot be made."""
    root = Path("/sys/fs/cgroup")
    is_second = (root / "cgroup.controllers").exists()
    folder = (root if is_second else root / "memory") / f"penstock-full-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / ("memory.max" if is_second else "memory.limit_in_bytes")).write_text(str(900 << 20))
    except OSError as error:
        pytest.skip(f"this kernel lets nobody make a control group here: {error}")
    yield folder
    wait_until(lambda: not (folder / "cgroup.procs").read_text())
    folder.rmdir()


@pytest.mark.stress
def test_a_worker_that_its_control_group_killed_is_told_of_with_the_groups_memory(
    full_group: Path, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(EATER)
    command = f'echo $$ > {full_group}/cgroup.procs && exec {sys.executable} "$@"'
    done = subprocess.run(
        ["bash", "-c", command, "bash", str(tmp_path / "train.py")],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert "was killed by SIGKILL while computing the batch at row 8" in done.stdout, done.stderr
    assert "The control group's memory is" in done.stdout
    assert "of its processes were killed for running out" in done.stdout

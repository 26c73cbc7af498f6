"""`penstock doctor` on scripts that know nothing of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from .scripts import diagnose, doctor

pytest.importorskip("torch")

SLOW = """
import sys, time, torch
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 100_000
    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.full((4,), float(index))

def main():
    loader = DataLoader(Slow(), batch_size=16)
    for step, batch in enumerate(loader):
        time.sleep(0.008)
        if step == 0:
            print("first", batch.shape, sys.argv[1:])
    print("the end")

if __name__ == "__main__":
    main()
"""


def write(folder: Path, text: str) -> str:
    (folder / "train.py").write_text(text)
    return "train.py"


def test_a_slow_dataset_without_workers_is_found_and_the_change_is_measured(tmp_path: Path) -> None:
    found = diagnose(write(tmp_path, SLOW), "--lr", "3", options=("--seconds", "30"), cwd=tmp_path)
    assert found["exit_code"] == 1, found
    first = found["findings"][0]
    assert first["id"] == "no-workers"
    assert first["where"] == "train.py:13"
    assert first["measured_gain"] > 1.2
    assert found["ceiling"]["ratio"] > 1.5
    assert "first torch.Size([16, 4]) ['--lr', '3']" in found["stderr"]
    assert "the end" not in found["stderr"]
    assert "Traceback" not in found["stderr"]


SHORT = """
import time, torch
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 600
    def __getitem__(self, index):
        time.sleep(0.005)
        return torch.full((4,), float(index))

if __name__ == "__main__":
    for step, batch in enumerate(DataLoader(Slow(), batch_size=8)):
        time.sleep(0.004)
    print("the end")
"""


@pytest.mark.stress
def test_a_script_that_ends_early_is_told_so_and_repeated_until_a_change_is_measured(tmp_path: Path) -> None:
    script = write(tmp_path, SHORT)
    once = diagnose(script, cwd=tmp_path)
    assert [each["id"] for each in once["findings"]] == ["no-workers"], once
    assert "the script ended after 75 steps" in once["verdict"]
    assert "--repeat" in once["findings"][0]["evidence"][-1]
    often = diagnose(script, options=("--repeat", "--seconds", "100"), cwd=tmp_path)
    assert often["findings"][0]["id"] == "no-workers", often
    assert often["stderr"].count("the end") >= 2
    gain = often["findings"][0]["measured_gain"]
    assert gain is None or gain > 1.5  # None where other programs make turns differ too much


def test_without_a_command_it_says_how_to_give_one() -> None:
    done = doctor()
    assert done.returncode == 2
    assert "penstock doctor -- train.py" in done.stderr


PACKED = """
import time
import numpy as np
import penstock

def main():
    documents = [np.arange(1 + index % 60, dtype=np.uint16) for index in range(2000)]
    plan = penstock.from_arrays({"tokens": documents}).shuffle(seed=1).pack(64).batch(4)
    for batch in penstock.DataLoader(plan, epochs=None):
        time.sleep(0.005)

if __name__ == "__main__":
    main()
"""


def test_a_script_that_loads_a_plan_is_examined_to_the_end(tmp_path: Path) -> None:
    found = diagnose(write(tmp_path, PACKED), options=("--seconds", "20"), cwd=tmp_path)
    assert "Traceback" not in found["stderr"]

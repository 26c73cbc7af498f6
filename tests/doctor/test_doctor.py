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


def test_without_a_command_it_says_how_to_give_one() -> None:
    done = doctor()
    assert done.returncode == 2
    assert "penstock doctor -- train.py" in done.stderr

"""Loaders in containers that forbid memory files, or have no /proc."""

from __future__ import annotations

import errno
from pathlib import Path

from confined import run_confined, without_memory_files

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
    with penstock.DataLoader(plan, workers="process", num_workers=2) as loader:
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


def test_everything_works_where_memory_files_are_forbidden(tmp_path: Path) -> None:
    assert run_trainer([without_memory_files(errno.ENOSYS)], tmp_path) == "1"


def test_without_proc_everything_works_but_counting_epochs_which_a_warning_says(tmp_path: Path) -> None:
    epoch, told = run_trainer(["/proc=0"], tmp_path).split("|")
    assert epoch == "0"
    assert told.startswith("/proc is not mounted")

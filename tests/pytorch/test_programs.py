"""Worker processes of programs as users write them: with threads, from scripts, modules and spawned trainers."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest


def run(command: list[Any], folder: Path, *, seconds: float = 200) -> str:
    """What a program prints; it must end well, and in time."""
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def write(path: Path, code: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(code))
    return path


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_map_that_uses_torch_runs_in_one_thread_after_the_trainer_used_openmp(method: str, tmp_path: Path) -> None:
    script = write(
        tmp_path / "train.py",
        f"""
        import numpy as np, torch, penstock

        def add(row, rng):
            sums = torch.ones(300_000).exp().cumsum(0)
            return {{"x": row["x"], "sum": sums[0].item(), "threads": torch.get_num_threads()}}

        if __name__ == "__main__":
            torch.set_num_threads(4)
            torch.ones(3_000_000).exp().sum()  # OpenMP has its threads now
            plan = penstock.from_arrays({{"x": np.arange(8)}}).map(add).batch(4)
            with penstock.DataLoader(plan, workers="process", num_workers=2, start_method={method!r}) as loader:
                print(sorted({{number for batch in loader for number in batch["threads"].tolist()}}))
        """,
    )
    assert run([script], tmp_path).strip() == "[1]"

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


@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.stress)])
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


@pytest.mark.timeout(300)
def test_workers_of_a_spawned_trainer_find_what_is_of_its_main_script(tmp_path: Path) -> None:
    script = write(
        tmp_path / "train.py",
        """
        import numpy as np, torch, torch.multiprocessing, penstock

        class Squares(torch.utils.data.Dataset):
            def __len__(self):
                return 6

            def __getitem__(self, index):
                return index * index

        def double(row, rng):
            return {"x": row["x"] * 2}

        def train(rank):
            options = {"batch_size": 3, "num_workers": 1, "multiprocessing_context": "spawn"}
            print([x for batch in penstock.DataLoader(Squares(), **options) for x in batch.tolist()])
            plan = penstock.from_arrays({"x": np.arange(4)}).map(double).batch(2)
            with penstock.DataLoader(plan, workers="process", num_workers=1, rank=0, world_size=1) as loader:
                print([x for batch in loader for x in batch["x"].tolist()], flush=True)

        if __name__ == "__main__":
            torch.multiprocessing.spawn(train, nprocs=1)
        """,
    )
    assert run([script], tmp_path) == "[0, 1, 4, 9, 16, 25]\n[0, 2, 4, 6]\n"


@pytest.mark.stress
def test_a_function_of_a_notebook_is_refused_with_what_to_do(tmp_path: Path) -> None:
    code = """
        import numpy as np, penstock
        def double(row, rng): return {"x": row["x"] * 2}
        plan = penstock.from_arrays({"x": np.arange(4)}).map(double).batch(2)
        try:
            next(iter(penstock.DataLoader(plan, workers="process")))
        except TypeError as error:
            print(error)
        """
    told = run(["-c", textwrap.dedent(code)], tmp_path)
    assert "%%writefile" in told
    assert "num_workers=0" in told
    assert "fork" not in told

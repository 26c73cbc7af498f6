"""Real frameworks, killed with -9 in mid-epoch, go on with the batch that comes next, on one process and on two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .frameworks import expected, packed

SCRIPT = Path(__file__).parent / "scripts" / "killed.py"
STEPS, SAVED, KILLED_IN = 20, 12, 13


def run(framework: str, folder: Path, mode: str, world_size: int) -> subprocess.CompletedProcess[str]:
    port = str(29500 + os.getpid() % 2000)
    launch = ["-m", "torch.distributed.run", f"--nproc_per_node={world_size}", "--master_port", port]
    command = [sys.executable, *(launch if world_size > 1 else []), str(SCRIPT), framework, str(folder), mode]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment, check=False)


def trained_on(folder: Path, mode: str, rank: int) -> list[list[int]]:
    return [json.loads(line) for line in (folder / f"{mode}-{rank}.jsonl").read_text().splitlines()]


@pytest.mark.stress
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("framework", ["transformers", "trl", "lightning", "accelerate"])
def test_a_killed_run_goes_on_with_the_batch_that_comes_next(tmp_path: Path, framework: str, world_size: int) -> None:
    killed = run(framework, tmp_path, "killed", world_size)
    assert killed.returncode != 0
    resumed = run(framework, tmp_path, "resumed", world_size)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    print(resumed.stdout)
    for rank in range(world_size):
        run_of_rank = expected(packed(), STEPS, rank, world_size)
        before, after = (trained_on(tmp_path, mode, rank) for mode in ("killed", "resumed"))
        assert before == run_of_rank[: len(before)]
        assert KILLED_IN <= len(before) <= KILLED_IN + 1
        assert after == run_of_rank[SAVED:]

"""The loss of an evaluation does not depend on how many processes share it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "evaluated.py"


def evaluate(folder: Path, world_size: int) -> list[float]:
    folder.mkdir()
    port = str(31500 + os.getpid() % 2000)
    launch = ["-m", "torch.distributed.run", f"--nproc_per_node={world_size}", "--master_port", port]
    command = [sys.executable, *(launch if world_size > 1 else []), str(SCRIPT), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, capture_output=True, timeout=280, env=environment, check=True)
    return [float((folder / f"loss-{rank}").read_text()) for rank in range(world_size)]


@pytest.mark.stress
@pytest.mark.timeout(600)
def test_two_processes_find_the_loss_that_one_finds(tmp_path: Path) -> None:
    [alone] = evaluate(tmp_path / "one", 1)
    assert evaluate(tmp_path / "two", 2) == pytest.approx([alone, alone], rel=1e-6)

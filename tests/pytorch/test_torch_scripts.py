"""Training scripts, unchanged but for the line that imports the loader, print the same losses to the last bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "scripts"


def start(script: Path, folder: Path) -> subprocess.Popen[str]:
    folder.mkdir()
    environment = os.environ | {"PYTHONWARNINGS": "error::UserWarning"}
    return subprocess.Popen(
        [sys.executable, script, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def losses(script: subprocess.Popen[str]) -> list[str]:
    output, errors = script.communicate(timeout=250)
    assert (script.returncode, errors) == (0, "")
    return output.splitlines()


@pytest.mark.stress
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "num_losses"),
    [("text", 50), ("images", 16), ("table", 60), ("distributed", 42)],
)
def test_losses_equal_torchs(name: str, num_losses: int, tmp_path: Path) -> None:
    script = SCRIPTS / f"{name}.py"
    source = script.read_text()
    line = next(line for line in source.splitlines() if line.startswith("from torch.utils.data import DataLoader"))
    changed = tmp_path / f"{name}.py"
    changed.write_text(source.replace(line, "from penstock import DataLoader\n" + line.replace("DataLoader, ", "")))
    torchs, ours = start(script, tmp_path / "torch"), start(changed, tmp_path / "penstock")
    expected = losses(torchs)
    assert len(expected) == len(set(expected)) == num_losses
    assert losses(ours) == expected

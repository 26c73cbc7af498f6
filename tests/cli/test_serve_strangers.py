"""`penstock serve` with a stranger's plan, in a stranger's folder: nothing that is there is run."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import penstock

SHADOWS = ("aiohttp", "cryptography", "json5", "pyarrow", "rich", "torch")
"""What a server imports, or could."""


def function(sample: dict[str, object]) -> dict[str, object]:
    return sample


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A plan that names code, one that does not, and modules that leave a file behind when they are imported."""
    np.save(tmp_path / "x.npy", np.arange(20))
    plan = penstock.open(tmp_path / "x.npy").shuffle(seed=1)
    (tmp_path / "plan.toml").write_text(plan.batch(2).to_toml())
    text = plan.map(function).batch(2).to_toml()
    (tmp_path / "naming.toml").write_text(text.replace(f"{__name__}:function", "evil:run"))
    assert "evil:run" in (tmp_path / "naming.toml").read_text()
    for name in (*SHADOWS, "evil"):
        (tmp_path / f"{name}.py").write_text(f"open('ran-{name}', 'w').close()\ndef run(sample): return sample\n")
    return tmp_path


def serve(folder: Path, *arguments: str) -> str:
    """What the command says, as it is installed: without the current folder among those that modules come from."""
    command = [sys.executable, "-P", "-m", "penstock.cli", "serve", *arguments, "--bind", "192.0.2.1:0"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode != 0
    return done.stderr


def test_modules_in_the_current_folder_are_not_imported(folder: Path) -> None:
    assert "needs TLS" in serve(folder, "plan.toml")  # all that comes before a server listens was done
    assert [path.name for path in folder.glob("ran-*")] == []


def test_what_a_server_needs_is_named_by_its_options(folder: Path) -> None:
    said = serve(folder, "plan.toml")
    assert "--certificate, --key" in said
    assert "--token-file" in said
    assert "--authority" in said


def test_a_server_says_where_it_is_and_ends_cleanly_at_ctrl_c(folder: Path) -> None:
    command = [
        sys.executable,
        "-P",
        "-m",
        "penstock.cli",
        "serve",
        "plan.toml",
        "--bind",
        "127.0.0.1:0",
        "--workers",
        "1",
    ]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        said = server.stdout.readline()
        server.send_signal(signal.SIGINT)
        _, errors = server.communicate(timeout=60)
    assert re.fullmatch(r"Serving [0-9a-f]{32} on 127\.0\.0\.1:\d+ with 1 worker\.\n", said)
    assert (server.returncode, errors) == (0, "")


def test_a_plan_that_names_code_is_refused_before_anything_is_imported(folder: Path) -> None:
    told = serve(folder, "naming.toml")
    assert "running code of 'evil' was not allowed" in told
    assert "--allow-code" in told
    assert [path.name for path in folder.glob("ran-*")] == []

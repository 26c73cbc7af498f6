"""Where compiled loops are kept, and that they run where they cannot be."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import penstock

CODE = "from penstock.order import _kernels; print(int(_kernels.child_key(1, 2)))"


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, env=os.environ | environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def read_only_package(tmp_path: Path) -> dict[str, str]:
    """A copy whose folders take no `__pycache__`, and a home that takes nothing: root may write to read-only ones."""
    copy = tmp_path / "site" / "penstock"
    shutil.copytree(Path(penstock.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in (copy, *(path for path in copy.rglob("*") if path.is_dir())):
        (folder / "__pycache__").touch()
    return {"PYTHONPATH": str(copy.parent), "HOME": "/proc/nowhere", "XDG_CACHE_HOME": "/proc/nowhere"}


def test_without_a_place_of_numbas_they_are_kept_in_a_temporary_folder_of_ones_own(
    tmp_path: Path, read_only_package: dict[str, str]
) -> None:
    assert run(CODE, TMPDIR=str(tmp_path), **read_only_package) == run(CODE)
    (folder,) = tmp_path.glob("penstock-kernels-*")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert list(folder.rglob("*child_key*.nbc"))


def test_a_temporary_folder_that_others_can_write_to_is_not_used(
    tmp_path: Path, read_only_package: dict[str, str]
) -> None:
    folder = tmp_path / f"penstock-kernels-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    assert run(CODE, TMPDIR=str(tmp_path), **read_only_package) == run(CODE)
    assert list(folder.iterdir()) == []


def test_a_full_disk_keeps_nothing_and_stops_nothing(tmp_path: Path) -> None:
    limited = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    limited += "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"  # no file may have a byte
    assert run(limited + CODE, NUMBA_CACHE_DIR=str(tmp_path)) == run(CODE)

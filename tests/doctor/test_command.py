"""What the words after `penstock doctor --` run, and what is said of files that are no program."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from penstock.doctor import command_of

from .scripts import doctor


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("plan.toml", "[dataset]\n", "plan.toml is not a script. If it is a plan, `penstock bench plan.toml` measures"),
        ("my run.ipynb", "{}", "nbconvert --to script 'my run.ipynb' && penstock doctor -- 'my run.py'"),
        ("train.sh", "python train.py\n", "is a script for sh: penstock doctor -- sh train.sh"),
        ("job.slurm", "#!/usr/bin/env bash\n", "is a script for bash: penstock doctor -- bash job.slurm"),
        (
            "config.yaml",
            "lr: 1\n",
            "not look like a Python script. If it is one: penstock doctor -- python config.yaml",
        ),
    ],
)
def test_what_is_no_python_script_is_not_run_as_one(name: str, text: str, said: str) -> None:
    Path(name).write_text(text)
    with pytest.raises(ValueError, match=re.escape(said)):
        command_of([name, "--lr", "1"])


def test_a_folder_is_answered_with_the_script_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a program of that name is installed."""
    Path("bin").mkdir()
    for name in ("project", "other"):
        Path("bin", name).write_text("#!/bin/sh\n")
        Path("bin", name).chmod(0o755)
    monkeypatch.setenv("PATH", "bin", prepend=os.pathsep)
    Path("project").mkdir()
    with pytest.raises(ValueError, match=r"is a folder\. Name the script to run: penstock doctor -- project/train\.py"):
        command_of(["project"])
    Path("project/main.py").write_text("")
    with pytest.raises(ValueError, match=r"penstock doctor -- project/main\.py"):
        command_of(["project"])
    Path("project/__main__.py").write_text("")
    with pytest.raises(ValueError, match="penstock doctor -- python project"):
        command_of(["project/"])
    Path("other").mkdir()
    assert command_of(["other", "train.py"]) == ("other", "train.py")  # as with a folder called `python`


@pytest.mark.parametrize("text", ["print()\n", "#!/usr/bin/env python3\nprint()\n"])
@pytest.mark.parametrize("name", ["train.py", "train"])
def test_a_python_script_needs_no_python_before_it(name: str, text: str) -> None:
    Path(name).write_text(text)
    assert command_of([name, "--lr", "1"]) == (sys.executable, name, "--lr", "1")


def test_a_program_in_this_folder_needs_no_dot_before_it(in_a_folder: Path) -> None:
    Path("go.sh").write_text("#!/bin/sh\n")
    Path("go.sh").chmod(0o755)
    assert command_of(["go.sh", "1"]) == (str(in_a_folder / "go.sh"), "1")
    assert command_of(["sh", "go.sh"]) == ("sh", "go.sh")


def test_the_command_refuses_a_plan_as_wrong_usage() -> None:
    Path("plan.toml").write_text("[dataset]\n")
    done = doctor("plan.toml", options=("--json",))
    assert done.returncode == 2
    assert "penstock bench plan.toml" in json.loads(done.stdout)["message"]
    assert done.stderr == ""

"""Tab, in a real bash, with what `penstock completion bash` prints."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli import main

# What bash itself does at Tab: it calls the function that was registered for the command.
PRESS_TAB = """
eval "$(penstock completion bash)"
COMP_LINE={line} COMP_POINT=${{#COMP_LINE}} COMP_TYPE=9
read -ra COMP_WORDS <<< "$COMP_LINE"; [[ $COMP_LINE == *' ' ]] && COMP_WORDS+=('')
COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
registered=($(complete -p penstock))
"${{registered[-2]}}" penstock "${{COMP_WORDS[-1]}}" "${{COMP_WORDS[-2]}}"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder, with the command on the path."""
    command = tmp_path / "bin" / "penstock"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m penstock.cli "$@"\n')
    command.chmod(0o755)
    return tmp_path


def press_tab(folder: Path, line: str) -> list[str]:
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["/bin/bash", "-c", PRESS_TAB.format(line=shlex.quote(line))],
        env={**os.environ, "PATH": path}, cwd=folder, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [word.rstrip() for word in done.stdout.splitlines() if word]


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("penstock ins", ["inspect"]),
        ("penstock inspect --f", ["--full"]),
        ("penstock prepare a.jsonl out --origins m", ["manifest"]),
        ("penstock doctor --html r", ["report.html"]),
    ],
)
def test_bash_completes_verbs_options_choices_and_files(folder: Path, line: str, completed: list[str]) -> None:
    (folder / "report.html").touch()
    assert press_tab(folder, line) == completed


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_gets_its_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert "penstock" in capsys.readouterr().out

"""A page of the documentation, followed as a reader would: what it says to save is saved, what it says to run is run.

Blocks run in order, in the current folder. Python blocks share one namespace; a block with a title is a file; a `sh`
block is typed line by line. Two comments that readers do not see steer this:

    <!-- given: texts, tokenizer -->          data that the page takes for granted; `given.py` makes it
    <!-- not run: needs a Slurm cluster -->   the block that follows is not run, for this reason
"""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from penstock.cli import main

_BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+) -->\n+)?"
    r'^```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$',
    re.DOTALL | re.MULTILINE,
)
_RUN = ("python", "sh")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the file it is, and why it is not run."""

    language: str
    title: str | None
    text: str
    reason: str | None

    @property
    def is_run(self) -> bool:
        return self.reason is None and (self.title is not None or self.language in _RUN)


def blocks_of(text: str) -> list[Block]:
    """All fenced blocks of a page, in order."""
    return [Block(each["language"], each["title"], each["text"], each["reason"]) for each in _BLOCK.finditer(text)]


def given_by(text: str) -> list[str]:
    """Names of the data that a page takes for granted."""
    return [name.strip() for line in re.findall(r"<!-- given: (.+) -->", text) for name in line.split(",")]


def follow(text: str, **names: Any) -> dict[str, Any]:
    """Do what a page says, in the current folder, with these names known from the start; all names afterwards."""
    session = ModuleType("session")  # a module, so that what is defined in it can be pickled
    vars(session).update(names)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "session", session)
        patch.syspath_prepend(Path.cwd())
        for block in blocks_of(text):
            if block.is_run:
                do(block, vars(session))
    for name, module in list(sys.modules.items()):  # another page may have a file of the same name
        if Path(getattr(module, "__file__", None) or "/").parent == Path.cwd():
            del sys.modules[name]
    return vars(session)


def do(block: Block, names: dict[str, Any]) -> None:
    """Save a block that is a file; run a Python block with these names; type in what is for the shell."""
    if block.title is not None:
        Path(block.title).parent.mkdir(parents=True, exist_ok=True)
        Path(block.title).write_text(block.text)
    elif block.language == "python":
        exec(compile(block.text, "<page>", "exec"), names)
    else:
        for line in block.text.replace("\\\n", "").splitlines():
            type_in(line)


def type_in(line: str) -> None:
    """Run a line of the shell; `penstock` and `python` without a new process, which would import torch again."""
    words = shlex.split(line, comments=True)
    if words[:1] == ["penstock"]:
        with suppress_exit():
            assert main(words[1:]) == 0, line
    elif words[:1] == ["python"] and words[1].endswith(".py"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", words[1:])
            patch.setattr(sys, "path", [str(Path(words[1]).parent.resolve()), *sys.path])
            runpy.run_path(words[1], run_name="__main__")
    elif words and words[0] != "pip":  # what pip is told to install is compared with pyproject.toml
        done = subprocess.run(line, shell=True, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@contextmanager
def suppress_exit() -> Iterator[None]:
    """`--version` and `--help` end the program; that is no failure."""
    try:
        yield
    except SystemExit as stopped:
        if stopped.code != 0:
            raise

"""What the words after `penstock doctor --` run: a program, or a Python script, which needs no `python` before it.

People also give what is neither: a plan, a notebook, a folder, a shell script. Python would take any of them for its
own source and fail with a traceback about that, so the user is told what to type instead.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.filesystem import similar_path


def command_of(words: Sequence[str]) -> tuple[str, ...]:
    """The program to run with its arguments; this interpreter, for a Python script.

    Raises:
        FileNotFoundError: there is no such program or script.
        ValueError: it is there, but is neither.
    """
    first, path = words[0], Path(words[0])
    is_python = path.suffix == ".py"
    if not is_python and shutil.which(first) is not None:
        return tuple(words)
    if path.is_dir():
        raise ValueError(_about_folder(path))
    if not path.is_file():
        what = "script" if is_python else "program or script"
        raise FileNotFoundError(f"There is no {what} {first!r}.{similar_path(path)}")
    if not is_python and os.access(path, os.X_OK):
        return (os.path.abspath(first), *words[1:])
    advice = "" if is_python else _advice_for(path)
    if advice:
        raise ValueError(advice)
    return (sys.executable, *words)


def _about_folder(path: Path) -> str:
    if (path / "__main__.py").exists():
        return f"{path} is a folder. To run the package in it: penstock doctor -- python {shlex.quote(str(path))}"
    scripts = sorted(each.name for each in path.glob("*.py"))
    likely = "train.py" if "train.py" in scripts or not scripts else scripts[0]
    return f"{path} is a folder. Name the script to run: penstock doctor -- {shlex.quote(str(path / likely))}"


def _advice_for(path: Path) -> str:
    """What to do with a file that is no Python script; nothing if it seems to be one."""
    quoted = shlex.quote(str(path))
    interpreter = _interpreter(path)
    if path.suffix == ".toml":
        return f"{path} is no script. If it is a plan, `penstock bench {quoted}` measures how fast its batches come."
    if path.suffix == ".ipynb":
        script = shlex.quote(str(path.with_suffix(".py")))
        return (
            f"{path} is a notebook. Turn it into a script first: "
            f"jupyter nbconvert --to script {quoted} && penstock doctor -- {script}"
        )
    if interpreter and "python" not in interpreter:
        return f"{path} is a script for {interpreter}: penstock doctor -- {interpreter} {quoted}"
    if interpreter or not path.suffix:
        return ""
    return f"{path} does not look like a Python script. If it is one: penstock doctor -- python {quoted}"


def _interpreter(path: Path) -> str:
    """What the first line names, or a shell by the name of the file; nothing if neither does."""
    with path.open("rb") as file:
        line = file.readline(200).decode(errors="replace").strip()
    if line.startswith("#!"):
        words = [word for word in line[2:].split() if word not in ("/usr/bin/env", "-S")]
        return os.path.basename(words[0]) if words else ""
    return path.suffix[1:] if path.suffix in (".sh", ".bash", ".zsh") else ""

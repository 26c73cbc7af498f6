"""The main job on this machine, in two minutes: prepare text, train on packed batches, be killed, resume."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from penstock.errors import MissingExtra

HELP = "show Penstock at work on this machine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    parser.add_argument("--path", type=Path, default=None, help="folder to leave everything in (default: none is left)")


def run(arguments: argparse.Namespace) -> int:
    """0 when every part of the demonstration worked."""
    import tempfile

    for package in ("torch", "tokenizers"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtra(f"The demonstration needs {package}: pip install 'penstock[torch,text]'")
    from penstock.cli._demonstration import demonstrate

    if arguments.path is not None:
        return demonstrate(arguments.path, as_json=arguments.json)
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as folder:
        return demonstrate(Path(folder), as_json=arguments.json)

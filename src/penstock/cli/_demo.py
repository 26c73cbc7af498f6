"""Penstock on this machine, in a minute: write a dataset, look at it, verify it, read it at speed."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "show Penstock at work on this machine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    parser.add_argument("--path", type=Path, default=None, help="where to leave the dataset (default: nowhere)")


def run(arguments: argparse.Namespace) -> int:
    """0 when every part of the demonstration worked."""
    import tempfile

    from penstock.cli._demonstration import demonstrate

    if arguments.path is not None:
        return demonstrate(arguments.path, as_json=arguments.json)
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as folder:
        return demonstrate(Path(folder) / "stdlib", as_json=arguments.json)

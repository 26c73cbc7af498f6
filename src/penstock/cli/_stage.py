"""Copy a dataset to this node's own storage, unless it is already there, and verify the copy.

Run it on every rank, or once per node: one process copies, the others wait for it. If interrupted, it continues where
it stopped; the dataset appears only once it is complete and every checksum is right.
"""

from __future__ import annotations

import argparse

from penstock.report import console, print_json, progress_bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    parser.add_argument("source", metavar="SRC", help="the dataset's folder")
    parser.add_argument("destination", metavar="DST", help="a folder on this node, such as $SCRATCH")


def run(arguments: argparse.Namespace) -> int:
    """0 once the dataset is there."""
    from penstock.dataset import stage

    with progress_bar("stage") as on_progress:
        staged = stage(arguments.source, arguments.destination, on_progress=on_progress)
    if arguments.json:
        print_json(staged.to_json())
    else:
        console().print(str(staged))
    return 0

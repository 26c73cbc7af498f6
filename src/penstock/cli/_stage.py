"""Copy a dataset to the storage of this node, unless it is there already, and verify the copy.

Run it on every rank, or once per node: one process copies, the others wait for it. Interrupted, it goes on where it
was; the dataset appears at its place only when all of it is there and every checksum is right.
"""

from __future__ import annotations

import argparse

from penstock.report import console, format_bytes, format_seconds, print_json, progress_bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    parser.add_argument("source", metavar="SRC", help="the dataset's folder")
    parser.add_argument("destination", metavar="DST", help="a folder of this node, such as $SCRATCH")


def run(arguments: argparse.Namespace) -> int:
    """0 when the dataset is there."""
    from penstock.placement import stage

    with progress_bar("stage") as on_progress:
        staged = stage(arguments.source, arguments.destination, on_progress=on_progress)
    if arguments.json:
        print_json(staged.to_json())
        return 0
    size = format_bytes(staged.num_bytes)
    if staged.copied_bytes:
        rate = format_bytes(staged.copied_bytes / max(staged.seconds, 1e-9))
        copied = (
            f"copied {format_bytes(staged.copied_bytes)} and verified in {format_seconds(staged.seconds)}, {rate}/s"
        )
    else:
        copied = "was there, or another process copied it"
    console().print(f"{staged.path}: {size}, {copied}.")
    if staged.is_remote:
        console().print("This folder is on a network as well: reading from it is no faster.")
    return 0

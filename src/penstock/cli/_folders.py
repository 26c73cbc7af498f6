"""`penstock verify` and `penstock stage`: a dataset checked, and copied to this node's own storage."""

from __future__ import annotations

import argparse

from penstock.errors import counted
from penstock.report import console, format_bytes, print_json, progress_bar


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    parser.add_argument("path", metavar="DATASET", help="the dataset's folder")


def run_verify(arguments: argparse.Namespace) -> int:
    """Check every byte of a dataset against its checksums and list what is damaged.

    Exit code: 0 if the dataset is intact, 1 if anything is wrong.
    """
    from penstock.shards import verify

    with progress_bar("verify") as on_progress:
        result = verify(arguments.path, on_progress=on_progress)
    if arguments.json:
        print_json(result.to_json())
    elif result.is_sound:
        size = format_bytes(result.num_bytes)
        console().print(
            f"{result.path}: sound. {counted(result.num_samples, 'sample')} in {counted(result.num_shards, 'shard')}, "
            f"{size}."
        )
    else:
        for fault in result.faults:
            console().print(fault)
        console().print(f"{result.path}: {counted(len(result.faults), 'fault')}.")
    return 0 if result.is_sound else 1


def add_stage_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    parser.add_argument("source", metavar="SRC", help="the dataset's folder")
    parser.add_argument("destination", metavar="DST", help="a folder on this node, such as $SCRATCH")


def run_stage(arguments: argparse.Namespace) -> int:
    """Copy a dataset to this node's own storage, unless it is already there, and verify the copy.

    Run it on every rank, or once per node: one process copies, the others wait for it. If interrupted, it continues
    where it stopped; the dataset appears only once it is complete and every checksum is right.
    """
    from penstock.dataset import stage

    with progress_bar("stage") as on_progress:
        staged = stage(arguments.source, arguments.destination, on_progress=on_progress)
    if arguments.json:
        print_json(staged.to_json())
    else:
        console().print(str(staged))
    return 0

"""Check every byte of a dataset against its checksums and list what is damaged."""

from __future__ import annotations

import argparse

from penstock.errors import counted
from penstock.report import console, format_bytes, print_json, progress_bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    parser.add_argument("path", metavar="DATASET", help="the dataset's folder")


def run(arguments: argparse.Namespace) -> int:
    """0 if the dataset is intact, 1 if anything is wrong."""
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

"""Read every byte of a dataset against its checksums and list what is damaged."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "read every byte of a dataset against its checksums"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    parser.add_argument("path", type=Path, metavar="DEST", help="folder of the dataset")


def run(arguments: argparse.Namespace) -> int:
    """0 when the dataset is sound, 1 when anything is wrong."""
    from penstock import report, shards

    with report.progress_bar("verify") as on_progress:
        result = shards.verify(arguments.path, on_progress=on_progress)
    if arguments.json:
        report.print_json(result.to_json())
    elif result.is_sound:
        size = report.format_bytes(result.num_bytes)
        report.console().print(
            f"{result.path}: sound. {result.num_samples:,} samples in {result.num_shards:,} shards, {size}."
        )
    else:
        for fault in result.faults:
            report.console().print(fault)
        report.console().print(f"{result.path}: {len(result.faults)} faults.")
    return 0 if result.is_sound else 1

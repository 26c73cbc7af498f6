"""Show what a dataset holds: columns, counts, sizes, provenance, lengths, and a few samples."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "show what a dataset holds"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    parser.add_argument("path", type=Path, metavar="DEST", help="folder of the dataset")
    parser.add_argument("--samples", type=int, default=3, metavar="N", help="samples to show (default: 3)")


def run(arguments: argparse.Namespace) -> int:
    """0 when the dataset could be described."""
    from penstock import report
    from penstock.cli._description import describe, print_description

    description = describe(arguments.path, num_samples=arguments.samples)
    if arguments.json:
        report.print_json(description.to_json())
    else:
        print_description(description)
    return 0

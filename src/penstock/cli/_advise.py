"""Say where a dataset should be and how to read it on this machine, within what this job may use.

Takes control groups, affinity and Slurm's variables into account. --measure reads a little of the data, and computes a
few batches of a plan.
"""

from __future__ import annotations

import argparse
import sys

from penstock.cli import _values
from penstock.report import console, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    parser.add_argument(
        "data", type=_values.path, metavar="DATASET|PLAN.toml", help="a dataset, or a plan as to_toml() writes it"
    )
    parser.add_argument("--measure", action="store_true", help="read a little, to measure the storage")
    parser.add_argument(
        "--reserve-gb", type=float, metavar="GB", help="memory that each training process needs for itself (default: 2)"
    )
    _values.add_allow_code(parser)


def run(arguments: argparse.Namespace) -> int:
    """Always 0."""
    from penstock.plan import load_plan
    from penstock.tuning import advise

    data = arguments.data
    if data.suffix == ".toml":
        sys.path.insert(0, "")  # find functions in the current folder, as `python -m` does
        data = load_plan(data, allow_code=arguments.allow_code)
    reserve = None if arguments.reserve_gb is None else 1e9 * arguments.reserve_gb
    advice = advise(data, measure=arguments.measure, reserve_bytes=reserve)
    if arguments.json:
        print_json(advice.to_json())
    else:
        console().print(str(advice))
    return 0

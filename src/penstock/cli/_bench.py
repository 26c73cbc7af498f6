"""Measure a loader: by itself, with a step of a given length, and, for a job, with its own step.

Prints batches per second and what share of the limit that is, the time to the first batch, the wait per step, CPU time
per batch, and memory.
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

from penstock.cli import _values
from penstock.cli._failures import output_of_job, tell_failure, tell_job_failure
from penstock.report import console, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    parser.add_argument(
        "what", type=_values.path, metavar="PLAN.toml|JOB.py", help="a plan, or a job as for `penstock tune`"
    )
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="steps that count (default: %(default)s)")
    parser.add_argument(
        "--step-ms",
        type=float,
        nargs="*",
        default=[10.0],
        metavar="MS",
        help="lengths of a step that only waits, in milliseconds (default: 10)",
    )
    parser.add_argument(
        "--workers", choices=("auto", "thread", "process", "inline"), help="kind of workers, for a plan (default: auto)"
    )
    parser.add_argument("--num-workers", type=int, metavar="N", help="number of workers, for a plan or a job")
    _values.add_allow_code(parser)
    parser.add_argument("--html", type=_values.output, metavar="FILE", help="write a report to open in a browser")


def run(arguments: argparse.Namespace) -> int:
    """0 if it was measured, 1 if that failed, 2 for wrong usage."""
    from penstock.plan import load_plan
    from penstock.report import render_html
    from penstock.tuning import bench_job, bench_plan, load_job

    if arguments.steps < 2 or any(not 0 < step < math.inf for step in arguments.step_ms):
        problem = ValueError("--steps must be at least 2, and --step-ms more than 0")
        tell_failure(problem, as_json=arguments.json)
        return 2
    given = {"workers": arguments.workers, "num_workers": arguments.num_workers}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    common: dict[str, Any] = {"steps": arguments.steps, "step_seconds": [step / 1000 for step in arguments.step_ms]}
    if arguments.what.suffix == ".toml":
        sys.path.insert(0, "")  # find functions in the current folder, as `python -m` does
        plan = load_plan(arguments.what, allow_code=arguments.allow_code)
        found = bench_plan(plan, arguments.what.name, options=options, **common)
    else:
        try:
            with output_of_job(as_json=arguments.json):
                job = load_job(arguments.what)
        except (ValueError, TypeError, FileNotFoundError) as error:
            tell_failure(error, as_json=arguments.json)
            return 2
        try:
            with output_of_job(as_json=arguments.json):
                found = bench_job(job, options=options, **common)
        except RuntimeError as error:
            tell_job_failure(error, as_json=arguments.json)
            return 1
    if arguments.html is not None:
        arguments.html.write_text(render_html(found.page()), encoding="utf-8")
    if arguments.json:
        print_json(found.to_json())
    else:
        console().print(str(found))
    return 0

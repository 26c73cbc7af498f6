"""Find the loader options with which a job trains fastest: try some in turns, and write a settings file.

The job is a Python file with two functions, make_loader(**options) and train_step(batch), and optionally the options
to try: SPACE = {"num_workers": [0, 2, 4], "prefetch_factor": [2, 8]}. Ctrl-C ends the search and shows what is known.
"""

from __future__ import annotations

import argparse
import sys

from penstock.cli import _values
from penstock.cli._failures import output_of_job, tell_failure, tell_job_failure
from penstock.report import console, print_json

_INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    parser.add_argument(
        "job", type=_values.path, metavar="JOB.py", help="a file with make_loader(**options) and train_step(batch)"
    )
    parser.add_argument(
        "--settings",
        type=_values.output,
        default="penstock-settings.toml",
        metavar="FILE",
        help="where to write the settings (default: %(default)s)",
    )
    parser.add_argument(
        "--steps", type=int, default=15, metavar="N", help="steps per turn that count (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, default=4, metavar="N", help="turns for each setting that races (default: %(default)s)"
    )
    parser.add_argument("--seconds", type=float, help="start no turn after this time")
    parser.add_argument("--html", type=_values.output, metavar="FILE", help="write a report to open in a browser")


def run(arguments: argparse.Namespace) -> int:
    """0 if settings were found and written, 1 if nothing could be run, 2 for wrong usage, 130 after Ctrl-C."""
    from penstock.report import render_html
    from penstock.tuning import TuneSettings, load_job, tune

    try:
        TuneSettings(steps=arguments.steps, rounds=arguments.rounds, seconds=arguments.seconds)
        with output_of_job(as_json=arguments.json):
            job = load_job(arguments.job)
    except (ValueError, TypeError, FileNotFoundError) as error:
        tell_failure(error, as_json=arguments.json)
        return 2
    try:
        with output_of_job(as_json=arguments.json):
            found = tune(
                job.make_loader,
                job.train_step,
                job.space,
                steps=arguments.steps,
                rounds=arguments.rounds,
                seconds=arguments.seconds,
                on_turn=_say_turn if sys.stderr.isatty() else None,
                name=job.name,
            )
    except RuntimeError as error:
        tell_job_failure(error, as_json=arguments.json)
        return 1
    found.write(arguments.settings)
    if arguments.html is not None:
        arguments.html.write_text(render_html(found.page()), encoding="utf-8")
    if arguments.json:
        print_json(found.to_json() | {"settings": str(arguments.settings)})
    else:
        console().print(str(found))
        path = str(arguments.settings)
        console().print(f"Written to {path}: penstock.DataLoader(..., settings={path!r})")
    is_short = not found.is_complete and arguments.seconds is None
    return _INTERRUPTED if is_short else 0


def _say_turn(number: int, arm: object, found: object) -> None:
    from penstock.tuning import name_of

    rate = getattr(found, "rate", None)
    result = f"{rate:.1f} steps/s" if rate is not None else f"failed: {type(found).__name__}"
    sys.stderr.write(f"turn {number}: {name_of(arm)}: {result}\n")  # type: ignore[arg-type]

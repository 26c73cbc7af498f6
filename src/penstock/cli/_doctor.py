"""`penstock doctor`: run a script under observation, and show what was found."""

from __future__ import annotations

import argparse

from penstock.cli import _values
from penstock.cli._failures import tell_failure
from penstock.cli._flags import Flags, given
from penstock.report import console, print_json


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    from penstock.doctor import DoctorSettings

    parser.add_argument("--html", type=_values.output, metavar="FILE", help="write a report to open in a browser")
    parser.add_argument("--perfetto", type=_values.output, metavar="FILE", help="write a trace for ui.perfetto.dev")
    Flags(parser, DoctorSettings).add("seconds", "steps", "observe", "repeat", "full")
    parser.usage = f"{parser.prog} [options] -- COMMAND"  # argparse would write three dots for COMMAND
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="-- COMMAND",
        help="train.py ARGS…, or python, torchrun, accelerate …",
    )


def run_doctor(arguments: argparse.Namespace) -> int:
    """Run a training script for a while, find out whether it waits for data, and try what would help.

    Exit code: 0 if training does not wait, 1 with findings, 2 without a command to run; a failing script's own.
    """
    from penstock.doctor import DoctorSettings, diagnose, make_page, recording_folder, run_script
    from penstock.report import render_html, render_terminal, to_perfetto

    words = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not words:
        problem = ValueError("doctor needs a script to run: penstock doctor -- train.py ARGS…")
        tell_failure(problem, as_json=arguments.json)
        return 2
    try:
        settings = DoctorSettings(**given(arguments, DoctorSettings))
    except ValueError as error:
        tell_failure(error, as_json=arguments.json)
        return 2
    with recording_folder() as folder:
        try:
            recording = run_script(words, settings, folder=folder, output_to_stderr=arguments.json)
        except (OSError, ValueError) as error:  # there is no such script or program, or it cannot be run
            tell_failure(error, as_json=arguments.json)
            return 2
        diagnosis = diagnose(recording)
    page = make_page(diagnosis)
    if arguments.json:
        print_json(diagnosis.to_json())
    else:
        console().print()  # the script may have left a progress bar in the middle of a line
        console().print(render_terminal(page))
    if arguments.html is not None:
        arguments.html.write_text(render_html(page), encoding="utf-8")
    if arguments.perfetto is not None:
        arguments.perfetto.write_text(to_perfetto(page), encoding="utf-8")
    return diagnosis.exit_code

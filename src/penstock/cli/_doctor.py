"""Run a training script for a while, find out whether it waits for data, and try what would help."""

from __future__ import annotations

import argparse

from penstock.cli import _values
from penstock.cli._failures import tell_failure
from penstock.report import console, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    parser.add_argument("--html", type=_values.output, metavar="FILE", help="write a report to open in a browser")
    parser.add_argument("--perfetto", type=_values.output, metavar="FILE", help="write a trace for ui.perfetto.dev")
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="stop trying changes after this time (default: %(default)g)"
    )
    parser.add_argument("--steps", type=int, metavar="N", help="stop after this many steps of the training loop")
    parser.add_argument("--observe", action="store_true", help="only measure the script as it is, and try nothing")
    parser.add_argument("--full", action="store_true", help="let the script run to its end")
    parser.usage = f"{parser.prog} [options] -- COMMAND"  # argparse would write three dots for COMMAND
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="-- COMMAND",
        help="train.py ARGS…, or python, torchrun, accelerate …",
    )


def run(arguments: argparse.Namespace) -> int:
    """0 if training does not wait, 1 with findings, 2 without a command to run; a failing script's own exit code."""
    from penstock.doctor import DoctorSettings, diagnose, make_page, recording_folder, run_script
    from penstock.report import render_html, render_terminal, to_perfetto

    words = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not words:
        problem = ValueError("doctor needs a script to run: penstock doctor -- train.py ARGS…")
        tell_failure(problem, as_json=arguments.json)
        return 2
    try:
        settings = DoctorSettings(
            seconds=arguments.seconds, steps=arguments.steps, full=arguments.full, observe=arguments.observe
        )
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

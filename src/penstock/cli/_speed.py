"""`penstock bench`, `tune`, `advise` and `doctor`: how fast a loader is, its best settings, and why a script waits."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import math
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from penstock.cli import _values
from penstock.cli._flags import Flags, add_allow_code, given
from penstock.cli._main import tell_failure
from penstock.report import console, print_json

if TYPE_CHECKING:
    from penstock.tuning import Options

_INTERRUPTED = 130


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
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
    add_allow_code(parser)
    parser.add_argument("--html", type=_values.output, metavar="FILE", help="write a report to open in a browser")


def run_bench(arguments: argparse.Namespace) -> int:
    """Measure a loader: by itself, with a step of a given length, and, for a job, with its own step.

    Prints batches per second and what share of the limit that is, the time to the first batch, the wait per step, CPU
    time per batch, and memory.

    Exit code: 0 if it was measured, 1 if that failed, 2 for wrong usage.
    """
    from penstock.filesystem import put_in_place
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
            with _output_of_job(as_json=arguments.json):
                job = load_job(arguments.what)
        except (ValueError, TypeError, FileNotFoundError) as error:
            tell_failure(error, as_json=arguments.json)
            return 2
        try:
            with _output_of_job(as_json=arguments.json):
                found = bench_job(job, options=options, **common)
        except RuntimeError as error:
            _tell_job_failure(error, as_json=arguments.json)
            return 1
    if arguments.html is not None:
        put_in_place(arguments.html, render_html(found.page()))
    if arguments.json:
        print_json(found.to_json())
    else:
        console().print(str(found))
    return 0


def add_tune_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    from penstock.tuning import tune

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
    Flags(parser, tune).add("steps", "rounds", "seconds")
    parser.add_argument("--html", type=_values.output, metavar="FILE", help="write a report to open in a browser")


def run_tune(arguments: argparse.Namespace) -> int:
    """Find the loader options with which a job trains fastest: try some in turns, and write a settings file.

    The job is a Python file with two functions, make_loader(**options) and train_step(batch), and optionally the
    options to try: SPACE = {"num_workers": [0, 2, 4], "prefetch_factor": [2, 8]}. Ctrl-C ends the search and shows what
    is known.

    Exit code: 0 if settings were found and written, 1 if nothing could be run, 2 for wrong usage, 130 after Ctrl-C.
    """
    from penstock.filesystem import put_in_place
    from penstock.report import render_html
    from penstock.tuning import TuneSettings, load_job, tune

    parameters, search = inspect.signature(tune).parameters, given(arguments, tune)
    try:
        TuneSettings(**{name: search.get(name, parameters[name].default) for name in ("steps", "rounds", "seconds")})
        with _output_of_job(as_json=arguments.json):
            job = load_job(arguments.job)
    except (ValueError, TypeError, FileNotFoundError) as error:
        tell_failure(error, as_json=arguments.json)
        return 2
    on_turn = _say_turn if sys.stderr.isatty() else None
    try:
        with _output_of_job(as_json=arguments.json):
            found = tune(job.make_loader, job.train_step, job.space, **search, on_turn=on_turn, name=job.name)
    except RuntimeError as error:
        _tell_job_failure(error, as_json=arguments.json)
        return 1
    found.write(arguments.settings)
    if arguments.html is not None:
        put_in_place(arguments.html, render_html(found.page()))
    if arguments.json:
        print_json(found.to_json() | {"settings": str(arguments.settings)})
    else:
        console().print(str(found))
        path = str(arguments.settings)
        console().print(f"Written to {path}: penstock.DataLoader(..., settings={path!r})")
    is_interrupted = not found.is_complete and "seconds" not in search
    return _INTERRUPTED if is_interrupted else 0


def _say_turn(number: int, arm: Options, found: Any) -> None:
    from penstock.tuning import name_of

    result = f"failed: {type(found).__name__}" if isinstance(found, Exception) else f"{found.rate:.1f} steps/s"
    sys.stderr.write(f"turn {number}: {name_of(arm)}: {result}\n")


def _tell_job_failure(error: RuntimeError, *, as_json: bool) -> None:
    """Say why a job could not be run, and where in the user's own lines."""
    from penstock.tuning import job_traceback

    tell_failure(error, as_json=as_json)
    if error.__cause__ is not None:
        sys.stderr.write(f"{job_traceback(error.__cause__)}\n")


@contextlib.contextmanager
def _output_of_job(*, as_json: bool) -> Iterator[None]:
    """What a job and its workers print meanwhile goes to standard error, if standard output is for one JSON object."""
    if not as_json or sys.stdout is None:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def add_advise_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    from penstock.tuning import advise

    parser.add_argument(
        "data", type=_values.path, metavar="DATASET|PLAN.toml", help="a dataset, or a plan as to_toml() writes it"
    )
    options = Flags(parser, advise)
    options.add("measure")
    options.add("reserve_bytes", flag="--reserve-gb", type=_values.gigabytes, metavar="GB")
    add_allow_code(parser)


def run_advise(arguments: argparse.Namespace) -> int:
    """Say where a dataset should be and how to read it on this machine, within what this job may use.

    Takes control groups, affinity and Slurm's variables into account. --measure reads a little of the data, and
    computes a few batches of a plan.
    """
    from penstock.plan import load_plan
    from penstock.tuning import advise

    options = given(arguments, advise)
    if arguments.data.suffix == ".toml":
        sys.path.insert(0, "")  # find functions in the current folder, as `python -m` does
        options["data"] = load_plan(arguments.data, allow_code=arguments.allow_code)
    advice = advise(**options)
    if arguments.json:
        print_json(advice.to_json())
    else:
        console().print(str(advice))
    return 0


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
    from penstock.filesystem import put_in_place
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
        put_in_place(arguments.html, render_html(page))
    if arguments.perfetto is not None:
        put_in_place(arguments.perfetto, to_perfetto(page))
    return diagnosis.exit_code

"""How a failure is told: a line on standard error, or with `--json` an object on standard output and nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator

from penstock.errors import printable


def tell_failure(error: BaseException, *, as_json: bool) -> None:
    """Say what went wrong, without a traceback."""
    text = printable(_message(error), keep="\n\t")
    if as_json:
        sys.stdout.write(json.dumps({"error": type(error).__name__, "message": text}) + "\n")
    else:
        sys.stderr.write(f"penstock: {text}\n")


def tell_job_failure(error: RuntimeError, *, as_json: bool) -> None:
    """Say why a job could not be run, and where in the user's own lines."""
    from penstock.tuning import job_traceback

    tell_failure(error, as_json=as_json)
    if error.__cause__ is not None:
        sys.stderr.write(f"{job_traceback(error.__cause__)}\n")


@contextlib.contextmanager
def output_of_job(*, as_json: bool) -> Iterator[None]:
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


def _message(error: BaseException) -> str:
    """What went wrong; an OSError's own text begins with its number."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, MemoryError):
        return f"out of memory{f': {error}' if str(error) else ''}"
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror

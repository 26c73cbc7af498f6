"""How a failure is told: a line on standard error, or with `--json` an object on standard output and nothing else."""

import json
import sys

from penstock.errors import printable


def tell_failure(error: BaseException, *, as_json: bool) -> None:
    """Say what went wrong, without a traceback."""
    text = printable(_message(error), keep="\n\t")
    if as_json:
        sys.stdout.write(json.dumps({"error": type(error).__name__, "message": text}) + "\n")
    else:
        sys.stderr.write(f"penstock: {text}\n")


def _message(error: BaseException) -> str:
    """What went wrong; an OSError's own text begins with its number."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, MemoryError):
        return f"out of memory{f': {error}' if str(error) else ''}"
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror

"""Verbs, exit codes and errors of the command.

Exit codes: 0 good, 1 a finding or a failure, 2 wrong usage. A verb imports heavy packages when it
runs, so that `penstock --help` answers at once.
"""

from __future__ import annotations

import argparse
import difflib
import io
import json
import sys
from collections.abc import Sequence
from typing import NoReturn

from penstock._version import __version__
from penstock.cli import _certificates, _demo, _doctor, _inspect, _prepare, _serve, _top, _verify
from penstock.errors import PenstockError, printable
from penstock.report import stop_printing

_VERBS = {
    "prepare": _prepare,
    "inspect": _inspect,
    "verify": _verify,
    "doctor": _doctor,
    "serve": _serve,
    "top": _top,
    "certificates": _certificates,
    "demo": _demo,
}


class _Parser(argparse.ArgumentParser):
    """Argument parser that suggests a verb when one is mistyped."""

    def error(self, message: str) -> NoReturn:
        typed = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
        guess = difflib.get_close_matches(typed, _VERBS, n=1) if "invalid choice" in message else []
        self.print_usage(sys.stderr)
        self.exit(2, f"penstock: {message}{f'. Did you mean {guess[0]!r}?' if guess else ''}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    _never_fail_to_print()
    try:
        return _run(_parser().parse_args(arguments))
    finally:
        _flush()


def _run(parsed: argparse.Namespace) -> int:
    try:
        return int(parsed.run(parsed))
    except (PenstockError, ValueError, OSError) as error:
        _report(error, as_json=parsed.json)
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("penstock: interrupted\n")
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="penstock",
        description="Keeps GPUs fed: prepares data once, loads it at memory speed, and says why a GPU waits.",
    )
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")
    for name, module in _VERBS.items():
        verb = verbs.add_parser(name, help=module.HELP, description=module.__doc__)
        verb.add_argument("--json", action="store_true", help="print JSON for machines")
        verb.set_defaults(run=module.run)
        module.add_arguments(verb)
    return parser


def _report(error: Exception, *, as_json: bool) -> None:
    text = printable(_message(error), keep="\n\t")
    if as_json:
        sys.stdout.write(json.dumps({"error": type(error).__name__, "message": text}) + "\n")
    else:
        sys.stderr.write(f"penstock: {text}\n")


def _message(error: Exception) -> str:
    """What went wrong; an OSError's own text begins with its number."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror


def _never_fail_to_print() -> None:
    """Escape characters in paths and samples that the terminal cannot show."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _flush() -> None:
    """Flush now: a reader that went away (`| head`) or was never there (`>&-`) is not an error."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        stop_printing()

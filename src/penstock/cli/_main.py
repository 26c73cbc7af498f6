"""Verbs, exit codes and errors of the command.

Exit codes: 0 good, 1 a finding or a failure, 2 wrong usage. A verb is imported when it is typed, and imports heavy
packages when it runs, so that `penstock --help` answers at once.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from penstock._version import __version__
from penstock.cli._verbs import VERBS, Verb, table_of_contents
from penstock.errors import PenstockError, did_you_mean, printable


class _Parser(argparse.ArgumentParser):
    """Parses `penstock VERB`; its help is the table of contents."""

    verb_parsers: Mapping[str, _VerbParser] = {}

    def error(self, message: str) -> NoReturn:
        guess = did_you_mean(*self._mistyped(message))
        self.print_usage(sys.stderr)
        self.exit(2, f"penstock: {message}{guess and '.'}{guess}\n")

    def _mistyped(self, message: str) -> tuple[str, list[str]]:
        """(what the message complains about, what the user could have meant)."""
        typed = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
        if "invalid choice" in message:
            return typed, list(VERBS)
        unknown = next((word for word in message.split() if word.startswith("--")), "")
        options = [] if typed not in self.verb_parsers else [*self.verb_parsers[typed]._option_string_actions]
        return unknown.partition("=")[0], [option for option in options if option.startswith("--")]

    def format_help(self) -> str:
        return (
            f"{self.format_usage()}\n{self.description}\n\n{table_of_contents()}\n\n"
            "`penstock VERB --help` describes a verb; `penstock --version` prints the version.\n"
        )


class _VerbParser(argparse.ArgumentParser):
    """Parses what follows a verb; imports the verb's module only when there is something to parse, even `--help`."""

    verb: Verb | None = None
    example = ""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(2, f"penstock: {message}\nTry `{self.example}`, or `{self.prog} --help`.\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.load()
        return super().parse_known_args(args, namespace)

    def load(self) -> None:
        """Declare the verb's arguments, once."""
        verb, self.verb = self.verb, None
        if verb is not None:
            module = verb.load()
            self.description = module.__doc__
            self.set_defaults(run=module.run)
            module.add_arguments(self)
            self.usage = self.usage or self._short_usage()

    def _short_usage(self) -> str:
        """The arguments of a verb, without a wall of options: the help lists them in groups."""
        formatter = self._get_formatter()
        needed = [action for action in self._actions if action.required and action.option_strings]
        words = [f"{action.option_strings[0]} {action.metavar}" for action in needed]
        words += [formatter._format_args(action, action.dest) for action in self._get_positional_actions()]
        return " ".join([self.prog, "[options]", *words]).replace("%", "%%")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    _never_fail_to_print()
    parser = _parser()
    if "_ARGCOMPLETE" in os.environ:
        _complete(parser)
    if not (sys.argv[1:] if arguments is None else arguments):
        parser.print_help()
        return 2
    try:
        return _run(parser.parse_args(arguments))
    finally:
        _flush()


def _complete(parser: _Parser) -> None:
    """Tell the shell, which runs the command for this purpose, what could come next. Does not return."""
    import argcomplete

    for word in os.environ.get("COMP_LINE", "").split():
        if word in parser.verb_parsers:
            parser.verb_parsers[word].load()
    argcomplete.autocomplete(parser)


def _run(parsed: argparse.Namespace) -> int:
    try:
        return int(parsed.run(parsed))
    except (PenstockError, ValueError, OSError) as error:
        _report(error, as_json=parsed.json)
        return 1
    except MemoryError as error:  # the arguments, or a file, ask for too much
        _report(error, as_json=parsed.json)
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("penstock: interrupted\n")
        return 130


def _parser() -> _Parser:
    parser = _Parser(
        prog="penstock",
        description="Keeps GPUs fed: prepares data once, loads it at memory speed, and says why a GPU waits.",
    )
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    parsers = parser.add_subparsers(required=True, metavar="VERB", parser_class=_VerbParser)
    for name, verb in VERBS.items():
        verb_parser = parsers.add_parser(
            name,
            help=verb.help,
            epilog=f"example:\n  {verb.example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        verb_parser.add_argument("--json", action="store_true", help="print JSON for machines")
        verb_parser.verb, verb_parser.example = verb, verb.example
    parser.verb_parsers = parsers.choices
    return parser


def _report(error: Exception, *, as_json: bool) -> None:
    text = printable(_message(error), keep="\n\t")
    if as_json:
        sys.stdout.write(json.dumps({"error": type(error).__name__, "message": text}) + "\n")
    else:
        sys.stderr.write(f"penstock: {text}\n")


def _message(error: Exception) -> str:
    """What went wrong; an OSError's own text begins with its number."""
    if isinstance(error, MemoryError):
        return f"out of memory{f': {error}' if str(error) else ''}"
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror


def _never_fail_to_print() -> None:
    """Escape characters that the terminal cannot show, in paths and samples."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _flush() -> None:
    """Flush now: a reader that went away (`| head`) or was never there (`>&-`) is not an error."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        from penstock.report import stop_printing

        stop_printing()

"""Verbs, exit codes and errors of the command, and how a shell completes it.

Exit codes: 0 good, 1 a finding or a failure, 2 wrong usage. A verb is imported when it is typed, and imports heavy
packages when it runs, so that `penstock --help` answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import io
import itertools
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from penstock._version import __version__
from penstock.errors import PenstockError, did_you_mean, printable


class Verb(NamedTuple):
    """One verb: its name, what it does in a line, and a command line to start from.

    No dataclass: importing `dataclasses` would add 12 ms to the 39 that `penstock --help` takes.
    """

    name: str
    help: str
    example: str
    module: str

    def declare(self, parser: argparse.ArgumentParser) -> None:
        """Import the verb's module, and tell the parser what it takes, what it is for, and what runs it."""
        import inspect

        module = importlib.import_module(f"penstock.cli.{self.module}")
        run = getattr(module, f"run_{self.name}")
        parser.description = inspect.cleandoc(run.__doc__ or "")
        parser.set_defaults(run=run)
        getattr(module, f"add_{self.name}_arguments")(parser)


CONTENTS: dict[str, tuple[Verb, ...]] = {
    "Datasets": (
        Verb(
            "prepare",
            "turn raw data into a dataset",
            "penstock prepare 'text/*.jsonl' corpus --tokenizer tok.json",
            "_prepare",
        ),
        Verb("inspect", "show what is in a dataset", "penstock inspect corpus", "_inspect"),
        Verb(
            "trace",
            'show which documents are in a batch, for "my loss jumped"',
            "penstock trace plan.toml --step 4711 --decode tok.json",
            "_trace",
        ),
        Verb("verify", "check every byte of a dataset against its checksums", "penstock verify corpus", "_folders"),
    ),
    "Speed": (
        Verb(
            "doctor",
            "run a training script and find out why it waits for data",
            "penstock doctor --html report.html -- train.py --epochs 1",
            "_speed",
        ),
        Verb("bench", "measure a loader by itself and with a training step", "penstock bench plan.toml", "_speed"),
        Verb("tune", "find the loader options with which a job trains fastest", "penstock tune job.py", "_speed"),
    ),
    "Where data is": (
        Verb("advise", "say how best to read a dataset on this machine", "penstock advise corpus --measure", "_speed"),
        Verb(
            "simulate",
            "say what nodes would fetch from an object store, and whether that is fast enough",
            "penstock simulate plan.toml --nodes 128 --ranks 8 --cache 500GB --bandwidth 25Gb",
            "_simulate",
        ),
        Verb("stage", "copy a dataset to this node's own storage", "penstock stage corpus $SCRATCH", "_folders"),
        Verb("push", "copy a dataset to an object store", "penstock push corpus s3://bucket/corpus", "_folders"),
        Verb("cache", "show what this node keeps of remote datasets, or empty it", "penstock cache", "_folders"),
    ),
    "Preprocessing on other machines": (
        Verb("serve", "serve the batches of a plan to training machines", "penstock serve plan.toml", "_servers"),
        Verb("top", "show what servers are doing, live", "penstock top cpu1:8815 cpu2:8815", "_servers"),
        Verb(
            "certificates",
            "make certificates for `penstock serve` and its clients",
            "penstock certificates tls cpu1 cpu2",
            "_servers",
        ),
    ),
    "Your shell": (
        Verb("completion", "have your shell complete this command", 'eval "$(penstock completion bash)"', "_main"),
    ),
}
VERBS = {verb.name: verb for verbs in CONTENTS.values() for verb in verbs}


class _Parser(argparse.ArgumentParser):
    """Parses `penstock VERB`; its help is the table of contents."""

    verb_parsers: Mapping[str, _VerbParser] = {}
    words: Sequence[str] = ()
    """What was typed."""

    def error(self, message: str) -> NoReturn:
        typed = next((word for word in self.words if not word.startswith("-")), "")
        guess = did_you_mean(*self._mistyped(message, typed))
        self.verb_parsers.get(typed, self).refuse(f"{message}{guess and '.'}{guess}", self.words)

    def refuse(self, message: str, words: Sequence[str]) -> NoReturn:
        """End the program for wrong usage."""
        _end_for_usage(self.format_usage(), message, words)

    def _mistyped(self, message: str, typed: str) -> tuple[str, list[str]]:
        """(what the message complains about, what the user could have meant)."""
        if "invalid choice" in message:
            return typed, list(VERBS)
        unknown = next((word for word in [*message.split(), *self.words] if word.startswith("--")), "")
        options = self.verb_parsers.get(typed, self)._option_string_actions
        return unknown.partition("=")[0], [option for option in options if option.startswith("--")]

    def format_help(self) -> str:
        return (
            f"{self.format_usage()}\n{self.description}\n\n{_table_of_contents()}\n\n"
            "`penstock VERB --help` describes a verb; `penstock --version` prints the version.\n"
        )


class _VerbParser(argparse.ArgumentParser):
    """Parses what follows a verb; imports the verb's module only when there is something to parse, even `--help`."""

    verb: Verb | None = None
    example = ""
    words: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        self.refuse(message, self.words)

    def refuse(self, message: str, words: Sequence[str]) -> NoReturn:
        """End the program for wrong usage of the verb."""
        hint = f"Try `{self.example}`, or `{self.prog} --help`."
        _end_for_usage(self.format_usage(), f"{message}\n{hint}", words)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.load()
        self.words = args or ()
        return super().parse_known_args(args, namespace)

    def load(self) -> None:
        """Declare the verb's arguments, once."""
        verb, self.verb = self.verb, None
        if verb is not None:
            verb.declare(self)
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
    parser.words = _verb_first(sys.argv[1:] if arguments is None else arguments)
    if not parser.words:
        parser.print_help()
        return 2
    try:
        return _run(parser.parse_args(parser.words))
    finally:
        _flush()


def _verb_first(words: Sequence[str]) -> Sequence[str]:
    """`--json` is an option of every verb, and people write it before the verb, too."""
    return [words[1], words[0], *words[2:]] if words[:1] == ["--json"] and len(words) > 1 else words


def _end_for_usage(usage: str, message: str, words: Sequence[str]) -> NoReturn:
    is_json = "--json" in itertools.takewhile("--".__ne__, words)  # behind `--` come words for others
    if not is_json:
        sys.stderr.write(usage)
    tell_failure(argparse.ArgumentError(None, message), as_json=is_json)
    sys.exit(2)


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
    except (
        PenstockError,
        ValueError,
        OSError,
        MemoryError,
    ) as error:  # the last if arguments or a file ask for too much
        tell_failure(error, as_json=parsed.json)
        return 1
    except KeyboardInterrupt as error:
        tell_failure(error, as_json=parsed.json)
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


def _table_of_contents() -> str:
    """Every verb under its heading, with what it does and an example."""
    width = 2 + max(map(len, VERBS))
    indent = " " * (width + 2)
    sections = []
    for heading, verbs in CONTENTS.items():
        lines = [f"  {verb.name:<{width}}{verb.help}\n{indent}$ {verb.example}" for verb in verbs]
        sections.append("\n".join([f"{heading}:", *lines]))
    return "\n\n".join(sections)


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


def tell_failure(error: BaseException, *, as_json: bool) -> None:
    """Say what went wrong: a line on standard error, or as JSON an object on standard output and nothing else."""
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


def add_completion_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `penstock completion` takes."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell to print it for")


def run_completion(arguments: argparse.Namespace) -> int:
    """Print a script that makes a shell complete verbs, options and files.

    bash and zsh evaluate it, fish sources it.
    """
    from argcomplete.shell_integration import shellcode

    script = shellcode(["penstock"], shell=arguments.shell)
    sys.stdout.write(json.dumps({"shell": arguments.shell, "script": script}) if arguments.json else script)
    sys.stdout.write("\n")
    return 0

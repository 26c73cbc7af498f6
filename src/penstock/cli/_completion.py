"""`penstock completion`: what makes a shell complete the command."""

import argparse
import sys

from penstock.report import print_json


def add_completion_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell to print it for")


def run_completion(arguments: argparse.Namespace) -> int:
    """Print a script that makes a shell complete verbs, options and files.

    bash and zsh evaluate it, fish sources it.
    """
    from argcomplete.shell_integration import shellcode

    script = shellcode(["penstock"], shell=arguments.shell)
    if arguments.json:
        print_json({"shell": arguments.shell, "script": script})
    else:
        sys.stdout.write(script + "\n")
    return 0

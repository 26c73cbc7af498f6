"""The terminal: one console for text, one kind of progress bar, and JSON on demand.

Bars go to standard error, so that piped output stays clean; without a terminal they are silent.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from penstock.errors import printable

if TYPE_CHECKING:
    from rich.console import Console


@functools.cache
def console() -> Console:
    """Standard output for people. Brackets and colons are not taken for markup; control characters are escaped."""
    from rich.console import Console

    class Terminal(Console):
        def print(self, *objects: Any, **options: Any) -> None:
            shown = (printable(each, keep="\n\t") if isinstance(each, str) else each for each in objects)
            super().print(*shown, **options)

        def on_broken_pipe(self) -> None:
            stop_printing()  # rich would end the process, with exit code 1

    return Terminal(highlight=False, soft_wrap=True, markup=False, emoji=False)


def print_json(value: Any) -> None:
    """One line of JSON on standard output."""
    try:
        sys.stdout.write(json.dumps(value) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        stop_printing()


def stop_printing() -> None:
    """Discard standard output from now on: its reader went away (`| head`), which is no reason to fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar with rate and remaining time; call the value with (bytes done, bytes in all)."""
    if not sys.stderr.isatty():  # in rich 13, even a disabled bar prints an empty line
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn(title),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)

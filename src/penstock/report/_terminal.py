"""The terminal: one console for text, one kind of progress bar, and JSON on demand.

Bars go to standard error, so that what is piped stays clean; without a terminal they are silent.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


@functools.cache
def console() -> Console:
    """Where people read; brackets and colons in what they read are no markup."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True, markup=False, emoji=False)


def print_json(value: Any) -> None:
    """One line of JSON on standard output."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar with rate and remaining time; the value is called with (bytes done, bytes in all)."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn(title),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)

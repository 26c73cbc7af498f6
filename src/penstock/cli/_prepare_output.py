"""What `penstock prepare` prints: a progress bar while it runs, a summary at the end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock.errors import counted

if TYPE_CHECKING:
    from penstock.preparation import Prepared, Progress


@contextmanager
def show_progress(*, as_json: bool) -> Iterator[Callable[[Progress], None]]:
    """A bar for people, lines of JSON for programs."""
    from penstock import report

    if as_json:
        yield lambda progress: report.print_json({"progress": progress.to_json()})
        return
    with preparation_bar() as show:
        yield show


@contextmanager
def preparation_bar() -> Iterator[Callable[[Progress], None]]:
    """A progress bar with the rates of documents, bytes and tokens, the time left, and workers that died."""
    if not sys.stderr.isatty():  # in rich 13, even a disabled bar prints an empty line
        yield lambda progress: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    from penstock.report import format_bytes

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[size]}"),
        TextColumn("{task.fields[rates]}"),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Bar(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        line = bar.add_task("listing the sources", total=None, size="", rates="")

        def show(progress: Progress) -> None:
            bar.update(
                line,
                description=progress.stage,
                completed=progress.raw_bytes,
                total=progress.total_bytes,
                size=f"{format_bytes(progress.raw_bytes)} of {format_bytes(progress.total_bytes)}",
                rates=_rates(progress),
            )

        yield show


def _rates(progress: Progress) -> str:
    from penstock.report import format_bytes

    parts = [f"{progress.documents_per_second:,.0f} documents/s", f"{format_bytes(progress.bytes_per_second)}/s"]
    if progress.tokens:
        parts.append(f"{progress.tokens_per_second / 1e6:.1f} Mtok/s")
    parts += [f"{progress.skipped:,} skipped"] if progress.skipped else []
    parts += [f"{worker} died {counted(count, 'time')}" for worker, count in progress.failures.items()]
    return ", ".join(parts)


def show_prepared(prepared: Prepared, *, as_json: bool) -> None:
    """Print the summary of a preparation."""
    from penstock import report

    if as_json:
        report.print_json(prepared.to_json())
        return
    report.console().print(str(prepared))

"""The terminal: one console for text, one kind of progress bar, JSON on demand, and the page.

Bars go to standard error, so that piped output stays clean; without a terminal they are silent. The page tells the
same story as in the browser, in the available width.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from penstock.errors import printable
from penstock.report._page import (
    Arm,
    FigureTable,
    Finding,
    Headline,
    Page,
    SlowSample,
    StepTimes,
    describe_gain,
    format_gain,
    format_number,
    format_seconds,
)

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

_STYLES = {"good": "bold green", "bad": "bold red", "plain": "bold"}
_BLOCKS = " ▁▂▃▄▅▆▇█"
_BAR_COLUMNS = 60
_INTERVAL_COLUMNS = 24
_GAP = 3
"""Blank columns between those of a table."""


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
    """Discard standard output from now on: its reader went away (`| head`). That is not a reason to fail."""
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


def render_terminal(page: Page) -> RenderableType:
    """Something that `rich` prints: `console().print(render_terminal(page))`."""
    from rich.console import Group

    parts: list[RenderableType] = [_text(page.title, "dim"), _text(page.verdict, _STYLES[page.tone])]
    parts += [_headlines(page.headlines)] if page.headlines else []
    parts += [_figure_table(table) for table in page.tables]
    parts += [part for number, finding in enumerate(page.findings, 1) for part in _finding(number, finding)]
    parts += [_steps(page.steps)] if page.steps is not None and page.steps.wait else []
    parts += [_arms(page.arms, console().width)] if page.arms else []
    parts += [_slowest(page.slowest)] if page.slowest else []
    if page.machine:
        parts.append(_text(" · ".join(f"{fact.name} {fact.value}" for fact in page.machine), "dim"))
    parts += [_text(note, "dim") for note in page.notes]
    return Group(*(piece for part in parts for piece in (part, "")))


def _text(words: str, style: str = "") -> Text:
    """Text from strangers, unchanged except for escaped control characters; nothing is taken for markup."""
    from rich.text import Text

    return Text(printable(words), style=style, no_wrap=False, overflow="fold")


def _grid(*justify: str, header: Sequence[str] = ()) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), show_header=bool(header), header_style="dim")
    for place, side in enumerate(justify):
        table.add_column(header[place] if header else "", justify="right" if side == "right" else "left")
    return table


def _headlines(headlines: tuple[Headline, ...]) -> Table:
    table = _grid(*["left"] * len(headlines))
    table.add_row(*(_text(each.value, _STYLES[each.tone]) for each in headlines))
    table.add_row(*(_text(each.label, "dim") for each in headlines))
    return table


def _finding(number: int, finding: Finding) -> Iterator[RenderableType]:
    from rich.console import Group
    from rich.padding import Padding

    title = _text(f"{number}. {finding.title}", "bold").append(f"  {describe_gain(finding)}", "bold cyan")
    lines = [_text(sentence) for sentence in finding.evidence]
    if finding.change:
        beside = ", ".join(filter(None, (finding.where, finding.price)))
        lines.append(_text("Change: ").append_text(_text(finding.change, "cyan")))
        lines[-1].append_text(_text(f"  # {beside}" if beside else "", "dim"))
    if finding.link:
        lines.append(_text(f"How: {finding.link}", "dim"))
    yield Group(title, Padding(Group(*lines), (0, 0, 0, 3)))


def _steps(times: StepTimes) -> Text:
    """Two rows of blocks, on one scale: how long each step waited, and how long it computed."""
    from rich.text import Text

    wait, step = _shrunk(times.wait), _shrunk(times.step)
    most = max(*wait, *step, 1e-12)
    heights = [[round(value / most * (len(_BLOCKS) - 1)) for value in values] for values in (wait, step)]
    waits, steps = ("".join(_BLOCKS[height] for height in each) for each in heights)
    return Text.assemble(
        ("wait  ", "dim"), (waits, "red"), ("  tallest ", "dim"), format_seconds(max(wait)),
        ("\nstep  ", "dim"), (steps, "blue"), ("  tallest ", "dim"), format_seconds(max(step)),
    )  # fmt: skip


def _shrunk(values: Sequence[float]) -> list[float]:
    """No more values than columns: the largest of each group, so that no peak is lost."""
    edges = [place * len(values) // _BAR_COLUMNS for place in range(_BAR_COLUMNS + 1)]
    return [max(values[low:high]) for low, high in itertools.pairwise(edges) if high > low]


def _arms(arms: tuple[Arm, ...], width: int) -> Table:
    from rich.text import Text

    headers = ["settings tried", "gain", "steps/s", "wait", "step", "cores"]
    rows = [
        [
            arm.name + (" ★" if arm.is_advised else ""),
            format_gain(arm.gain),
            format_number(arm.steps_per_second),
            format_seconds(arm.wait_seconds),
            format_seconds(arm.step_seconds),
            "" if arm.cores is None else format_number(arm.cores),
        ]
        for arm in arms
    ]
    if all(arm.cores is None for arm in arms):
        headers, rows = headers[:-1], [row[:-1] for row in rows]
    widest = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    if sum(widest) + _INTERVAL_COLUMNS + _GAP * len(widest) <= width:
        headers.insert(2, "")
        for row, drawn in zip(rows, _intervals(arms), strict=True):
            row.insert(2, drawn)
    table = _grid("left", *["right"] * (len(headers) - 1), header=headers)
    for arm, (name, *cells) in zip(arms, rows, strict=True):
        style = "bold cyan" if arm.is_advised else ""
        table.add_row(_text(name, style), *(Text(cell, no_wrap=True) for cell in cells))
    return table


def _intervals(arms: tuple[Arm, ...]) -> Iterator[str]:
    """Each gain with its interval, all on one scale."""
    low = min(0.9, *(arm.gain.ratio - arm.gain.error for arm in arms))
    high = max(1.1, *(arm.gain.ratio + arm.gain.error for arm in arms))

    def column(ratio: float) -> int:
        return round((ratio - low) / (high - low) * (_INTERVAL_COLUMNS - 1))

    for arm in arms:
        cells = [" "] * _INTERVAL_COLUMNS
        cells[column(1.0)] = "│"
        for place in range(column(arm.gain.ratio - arm.gain.error), column(arm.gain.ratio + arm.gain.error) + 1):
            cells[place] = "─"
        cells[column(arm.gain.ratio)] = "●"
        yield "".join(cells)


def _figure_table(figures: FigureTable) -> Table:
    numbers = ["right"] * (len(figures.header) - 1)
    table = _grid("left", *numbers, header=[*map(printable, (figures.header[0] or figures.title, *figures.header[1:]))])
    for row in figures.rows:
        table.add_row(*map(_text, row))
    return table


def _slowest(samples: tuple[SlowSample, ...]) -> Table:
    table = _grid("right", "right", "right", "left", header=("slowest samples", "time", "computing", ""))
    for sample in samples:
        computing = "" if sample.cpu_seconds is None else format_seconds(sample.cpu_seconds)
        cells = (sample.index, format_seconds(sample.seconds), computing, sample.worker)
        table.add_row(*(_text(cell) for cell in cells))
    return table

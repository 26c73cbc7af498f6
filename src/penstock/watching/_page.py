"""A watched run as a page: what the training loop did, and what is worth knowing about it.

Nothing was tried, so no gain is promised: `penstock doctor` does that.
"""

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from penstock.machine import MachineFacts, UsageHistory
from penstock.report import (
    Chart,
    Fact,
    Finding,
    Headline,
    Lane,
    Page,
    Span,
    StepTimes,
    Tone,
    format_bytes,
    format_number,
    format_seconds,
)
from penstock.watching._summary import COLUMNS, StepHistory, WatchSummary, format_cores, format_share

_MOST_STEPS_IN_LANES = 1500
_GIGABYTE = 1e9

Floats = NDArray[np.float64]


def watch_page(summary: WatchSummary, history: StepHistory, usage: UsageHistory | None) -> Page:
    """The page of what was recorded so far."""
    first, rows = history.latest()
    # The page's time begins with the first reading, or with the first step that is still known.
    moments = [*rows[:1, COLUMNS["begin"]], *([] if usage is None else usage.time_seconds[:1])]
    begin = float(min(moments, default=0.0))
    wait, step = (tuple(history.means(column).tolist()) for column in ("wait", "step"))
    return Page(
        title=f"penstock watch · {summary.name}",
        verdict=summary.verdict,
        tone="plain" if not summary.num_steps else "good" if summary.is_healthy else "bad",
        headlines=tuple(_headlines(summary)),
        findings=tuple(finding for find in _FINDERS if (finding := find(summary)) is not None),
        lanes=(Lane(name="training", spans=tuple(_spans(first, rows, begin))),) if len(rows) else (),
        steps=StepTimes(wait=wait, step=step, steps_per_entry=history.steps_per_block) if history.num_steps else None,
        charts=tuple(_charts(history, usage, begin)),
        machine=tuple(machine_facts(summary.machine)),
        notes=tuple(_notes(summary, len(rows))),
    )


def _headlines(summary: WatchSummary) -> Iterator[Headline]:
    if not summary.num_steps:
        return
    yield Headline(value=f"{format_number(summary.steps_per_second)}/s", label="steps")
    tone: Tone = "good" if summary.is_healthy else "bad"
    yield Headline(value=format_share(summary.wait_share), label="of the time spent waiting", tone=tone)
    yield Headline(value=format_seconds(summary.long_wait_seconds), label="or more is waited in one step of a hundred")
    if summary.training_cores is not None and summary.worker_cores is not None:
        value = f"{format_cores(summary.training_cores)} + {format_cores(summary.worker_cores)}"
        yield Headline(value=value, label="cores used by training + by its workers")


def _spans(first: int, rows: Floats, begin: float) -> Iterator[Span]:
    cut = max(0, len(rows) - _MOST_STEPS_IN_LANES)
    for place, row in enumerate(rows[cut:], first + cut):
        asked, wait, step = (float(row[COLUMNS[name]]) for name in ("begin", "wait", "step"))
        yield Span(start=asked - begin, duration=wait, kind="wait", step=place)
        yield Span(start=asked - begin + wait, duration=step, kind="step", label=f"step {place}", step=place)


def _charts(history: StepHistory, usage: UsageHistory | None, begin: float) -> Iterator[Chart]:
    moments = history.means("begin") - begin
    if len(moments) > 1:
        seconds = _smooth(history.means("wait") + history.means("step"))
        yield Chart.of("Throughput", "steps/s", moments, {"steps": 1 / np.maximum(seconds, 1e-9)})
    queued = history.means("queued")
    if np.isfinite(queued).any() and len(moments) > 1:
        yield Chart.of("Batches ready", "batches", moments, {"when one was asked for": _smooth(queued)})
    if usage is not None:
        yield from usage_charts(usage, begin)


def usage_charts(
    usage: UsageHistory, begin: float, *, root: str = "training", children: str = "workers"
) -> Iterator[Chart]:
    """What a job's first process (`root`), its children and other programs used of the machine."""
    if len(usage.time_seconds) < 3:
        return
    times, rates = usage.time_seconds[1:] - begin, usage.rates()
    cores = {root: rates.root_cores, children: rates.children_cores, "other programs": rates.other_cores}
    yield Chart.of("Processors", "cores", times, cores)
    memory = {"resident": usage.rss_bytes[1:], "shared pages once": usage.pss_bytes[1:]}
    yield Chart.of("Memory", "GB", times, {name: values / _GIGABYTE for name, values in memory.items()})
    reads = rates.read_bytes / 1e6
    if np.nanmax(reads, initial=0) > 0.1:
        yield Chart.of("Read from storage", "MB/s", times, {"reads": reads})
    if np.isfinite(usage.accelerator_utilization).any():
        yield Chart.of("Accelerator", "%", times, {"busy": 100 * usage.accelerator_utilization[1:]})


def _smooth(values: Floats) -> Floats:
    """Means over a fiftieth of the run, so that a line can be read."""
    size = max(1, len(values) // 50)
    ends = np.convolve(np.nan_to_num(values), np.ones(size), mode="same")
    return np.asarray(ends / np.convolve(np.isfinite(values).astype(float), np.ones(size), mode="same"))


def _uneven_waits(summary: WatchSummary) -> Finding | None:
    """Most batches come in time, a few hold everything up."""
    usual = max(summary.wait_seconds / 4, summary.typical_wait_seconds)
    if summary.is_healthy or summary.long_wait_seconds < 10 * usual:
        return None
    long = [number for number, seconds in summary.longest_waits if seconds >= summary.long_wait_seconds / 2]
    return Finding(
        id="uneven-waits",
        title="A few batches hold up all others",
        evidence=(
            f"Half of the waits are below {format_seconds(summary.typical_wait_seconds)}, one in a hundred is above "
            f"{format_seconds(summary.long_wait_seconds)}.",
            "More batches computed ahead bridge such waits, if the mean is fast enough.",
        ),
        change="DataLoader(..., prefetch_factor=8)",
        steps=tuple((number, number + 1) for number in sorted(long)),
    )


def _slow_starts(summary: WatchSummary) -> Finding | None:
    """Each loop starts its workers again, and that takes a noticeable share of the time."""
    share = summary.start_seconds * summary.num_loops / max(1e-9, summary.seconds)
    if summary.num_loops < 2 or share < 0.03:
        return None
    return Finding(
        id="slow-starts",
        title="Every loop starts its workers again",
        evidence=(
            f"Beginning one takes {format_seconds(summary.start_seconds)}, and there were {summary.num_loops}: "
            f"{100 * share:.0f} % on top of the time of all steps.",
        ),
        change="DataLoader(..., persistent_workers=True)",
    )


def _no_core(summary: WatchSummary) -> Finding | None:
    """The training thread itself has to queue for a processor."""
    lost = summary.no_core_seconds or 0.0
    if lost < 0.05 * (summary.wait_seconds + summary.step_seconds):
        return None
    others, workers = summary.other_cores or 0.0, summary.worker_cores or 0.0
    who = "Other programs" if others > workers else "Its own workers"
    used = f"{who} use {format_cores(max(others, workers))} of the {summary.machine.num_processors} cores."
    return Finding(
        id="no-core",
        title="The training thread waits for a core",
        evidence=(f"It was ready to run but had none for {format_seconds(lost)} of every step.", used),
        change="fewer workers, fewer threads, or cores of your own: #SBATCH --cpus-per-task=N",
    )


def _cold_pages(summary: WatchSummary) -> Finding | None:
    """The training thread reads memory-mapped pages from disk."""
    if summary.major_faults < 1:
        return None
    pages = format_number(summary.major_faults)
    return Finding(
        id="cold-pages",
        title="The training thread waits for the disk",
        evidence=(f"It touched {pages} pages in every step that had to come from storage.",),
        change="read in workers: DataLoader(..., num_workers=2)",
    )


def _ask_the_doctor(summary: WatchSummary) -> Finding | None:
    """Watching alone cannot say what a change would give."""
    if summary.is_healthy or not summary.num_steps:
        return None
    most = math.inf if summary.wait_share >= 1 else 1 / (1 - summary.wait_share)
    return Finding(
        id="doctor",
        title="What a change would give can be measured",
        evidence=(
            f"A loader that never kept training waiting would make it at most {most:.3g} × faster. The doctor tries "
            "changes on your job, in turns with what you have, and says what each gives.",
        ),
        change="penstock doctor -- train.py",
    )


_FINDERS = (_uneven_waits, _slow_starts, _no_core, _cold_pages, _ask_the_doctor)


def machine_facts(machine: MachineFacts) -> Iterator[Fact]:
    """What the machine is, for a page."""
    cores = f"{machine.usable_processors} of {machine.num_processors} cores"
    yield Fact(name="processor", value=f"{machine.processor}, {cores}")
    if machine.memory_bytes is not None:
        limit = "" if machine.memory_limit_bytes is None else f", limit {format_bytes(machine.memory_limit_bytes)}"
        yield Fact(name="memory", value=format_bytes(machine.memory_bytes) + limit)
    yield Fact(name="accelerator", value=", ".join(machine.accelerators) or "none found")
    yield Fact(name="system", value=f"{machine.system}, Python {machine.python}")


def _notes(summary: WatchSummary, num_latest: int) -> Iterator[str]:
    shown = min(num_latest, _MOST_STEPS_IN_LANES)
    if summary.num_steps > shown:
        yield f"The lanes show the last {shown:,} of {summary.num_steps:,} steps."
    if summary.no_core_seconds is None:
        yield "This kernel does not say how long a thread waits for a core (no schedstat)."
    if summary.training_cores is None:
        yield "Processes and machine could not be read, or were not asked for."

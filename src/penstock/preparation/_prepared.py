"""What `prepare` returns: counts, what was skipped, where the time went; and how that reads."""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.errors import counted
from penstock.preparation._records import sum_counts
from penstock.preparation._specification import Settings

PHASES = ("read", "transform", "write")
_SHOWN_CLASSES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A finished preparation."""

    path: Path | str
    """Where to open it: a folder, or the URL that was given."""
    num_samples: int
    """Samples in the dataset."""
    num_tokens: int
    """Elements of its column `tokens`; 0 if there is none."""
    num_shards: int
    num_bytes: int
    """Bytes of the shards."""
    num_files: int
    """Source files."""
    tasks_run: int
    """Tasks that this run did itself."""
    tasks_kept: int
    """Tasks that earlier runs had done."""
    raw_bytes: int
    """Bytes of the sources that this run read."""
    skipped: Mapping[str, int]
    """Rows left out of the dataset, by reason."""
    noticed: Mapping[str, int]
    """What the transform noticed in the rows of the dataset, such as special tokens that it encoded as text."""
    classes: tuple[str, ...]
    """Names of the classes in the order of their labels; empty if the sources have none."""
    seconds: Mapping[str, float]
    """Times of this run: "total", "start_up" (until the first task could start), "work", "commit"."""
    worker_seconds: Mapping[str, float]
    """Summed over all workers: "read", "transform", "write"."""
    processor_seconds: Mapping[str, float]
    """CPU time in the same phases; much less than the above means that workers waited."""
    peak_worker_bytes: int
    """The most memory that any worker used; 0 if none ran."""
    failures: Mapping[str, int]
    """How often each worker died; its tasks were repeated."""
    notes: tuple[str, ...]
    """Sentences that the user should see."""
    parts: Mapping[str, Prepared] = field(default_factory=dict)
    """With a split, its parts by name, of which the above are the sums; otherwise empty."""

    @property
    def bottleneck(self) -> str:
        """The phase that took most of the workers' time; "" if no worker ran."""
        return max(self.worker_seconds, key=lambda phase: self.worker_seconds[phase]) if self.tasks_run else ""

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def to_json(self) -> dict[str, Any]:
        """Plain data for `--json` and run.json."""
        fields = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        plain = {"path": str(self.path), "notes": list(self.notes), "bottleneck": self.bottleneck}
        parts = {"parts": {name: part.to_json() for name, part in self.parts.items()}} if self.parts else {}
        del fields["parts"]
        return {**fields, **plain, **parts}


def describe_run(settings: Settings, summary: Prepared) -> dict[str, Any]:
    """The contents of run.json: everything that depends on time, host and workers."""
    return {
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "host": platform.node(),
        "python": platform.python_version(),
        "engine": settings.engine,
        "workers": settings.num_workers,
        **summary.to_json(),
    }


def sum_parts(path: Path | str, parts: Mapping[str, Prepared]) -> Prepared:
    """One summary of all parts of a split."""
    made = list(parts.values())
    return Prepared(
        path=path,
        num_samples=sum(each.num_samples for each in made),
        num_tokens=sum(each.num_tokens for each in made),
        num_shards=sum(each.num_shards for each in made),
        num_bytes=sum(each.num_bytes for each in made),
        num_files=made[0].num_files,
        tasks_run=sum(each.tasks_run for each in made),
        tasks_kept=min(each.tasks_kept for each in made),
        raw_bytes=sum(each.raw_bytes for each in made),
        skipped=sum_counts(each.skipped for each in made),
        noticed=sum_counts(each.noticed for each in made),
        classes=made[0].classes,
        seconds={name: max(each.seconds[name] for each in made) for name in made[0].seconds},
        worker_seconds=_add_up([each.worker_seconds for each in made]),
        processor_seconds=_add_up([each.processor_seconds for each in made]),
        peak_worker_bytes=max(each.peak_worker_bytes for each in made),
        failures=sum_counts(each.failures for each in made),
        notes=tuple(dict.fromkeys(note for each in made for note in each.notes)),
        parts=parts,
    )


def _add_up(spent: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(each[name] for each in spent) for name in spent[0]}


def _lines(prepared: Prepared) -> Iterator[str]:
    """What was made, then what to know about it, indented."""
    yield _made(prepared)
    yield from (f"  {_made(part)}" for part in prepared.parts.values())
    if prepared.classes:
        yield f"  classes: {_name_classes(prepared.classes)}"
    for reason, count in prepared.skipped.items():
        yield f"  skipped {counted(count, 'row')}: {reason}"
    for what, count in prepared.noticed.items():
        yield f"  noticed {what.replace('_', ' ')}: {count:,}"
    if prepared.tasks_run:
        yield from _times(prepared)
    for worker, count in prepared.failures.items():
        yield f"  {worker} died {counted(count, 'time')}; its tasks were repeated"
    yield from (f"  {note}" for note in prepared.notes)


def _made(prepared: Prepared) -> str:
    from penstock.report import format_bytes

    tokens = f", {counted(prepared.num_tokens, 'token')}" if prepared.num_tokens else ""
    return (
        f"{prepared.path}: {counted(prepared.num_samples, 'sample')}{tokens} "
        f"in {counted(prepared.num_shards, 'shard')}, {format_bytes(prepared.num_bytes)}, "
        f"from {counted(prepared.num_files, 'file')}."
    )


def _name_classes(classes: Sequence[str]) -> str:
    shown = [f"{label} {name}" for label, name in enumerate(classes)]
    return ", ".join(shown if len(shown) <= _SHOWN_CLASSES else [*shown[: _SHOWN_CLASSES - 2], "…", shown[-1]])


def _times(prepared: Prepared) -> Iterator[str]:
    from penstock.report import format_bytes

    seconds, busy = prepared.seconds, sum(prepared.worker_seconds.values())
    rate = format_bytes(prepared.raw_bytes / max(1e-9, seconds["work"]))
    kept = f", {prepared.tasks_kept:,} kept" if prepared.tasks_kept else ""
    start_up = f"start-up {seconds['start_up']:.1f} s"
    yield f"  {counted(prepared.tasks_run, 'task')} in {seconds['work']:.1f} s{kept}: {rate}/s; {start_up}"
    shares = ", ".join(
        f"{name} {100 * spent / max(1e-9, busy):.0f} %" for name, spent in prepared.worker_seconds.items()
    )
    yield f"  workers: {shares}; at most {format_bytes(prepared.peak_worker_bytes)} of memory each"

"""What a run of `prepare` did: its records, where the time went, and notes that the user should see."""

from __future__ import annotations

import collections
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.errors import counted, first_few
from penstock.preparation._first_rows import FirstRows
from penstock.preparation._prepared import Prepared
from penstock.preparation._previous import Previous
from penstock.preparation._progress import Counts
from penstock.preparation._settings import Settings
from penstock.preparation._specification import Specification
from penstock.preparation._task_record import TaskRecord
from penstock.shapes import COUNT, find_mismatch
from penstock.shards import Manifest, classes_of
from penstock.sources import SourceFile, SourceOptions, changed_since, is_data_name

PHASES = ("read", "transform", "write")
_SHOWN_KINDS = 5


@dataclass(slots=True)
class RunLedger:
    """What a run did itself, and when."""

    records: list[TaskRecord] = field(default_factory=list)
    """Records of the tasks that this run did itself."""
    num_kept: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    _begin: float = field(default_factory=time.perf_counter)
    _ready: float | None = None
    _worked: float | None = None

    def mark_ready(self) -> None:
        """The first task can start; only the first call counts."""
        self._ready = self._ready or time.perf_counter()

    def mark_worked(self) -> None:
        """All tasks are finished."""
        self._worked = time.perf_counter()

    def summarise(
        self, path: Path, manifest: Manifest, *, num_files: int, skipped: Mapping[str, int], notes: Sequence[str]
    ) -> Prepared:
        """The summary of this run and of the dataset that `manifest` describes."""
        total = Counts()
        for record in self.records:
            total.add(record.counts)
        return Prepared(
            path=path,
            num_samples=manifest.num_samples,
            num_tokens=sum(shard.num_values.get("tokens", 0) for shard in manifest.shards),
            num_shards=len(manifest.shards),
            num_bytes=manifest.num_bytes,
            num_files=num_files,
            tasks_run=len(self.records),
            tasks_kept=self.num_kept,
            raw_bytes=total.raw_bytes,
            skipped=dict(skipped),
            noticed=_noticed_in(manifest),
            classes=classes_of(manifest.attributes),
            seconds=self._seconds(),
            worker_seconds={phase: getattr(total, f"{phase}_seconds") for phase in PHASES},
            processor_seconds={phase: getattr(total, f"{phase}_processor_seconds") for phase in PHASES},
            peak_worker_bytes=max((record.peak_bytes for record in self.records), default=0),
            failures=dict(self.failures),
            notes=tuple(notes),
        )

    def _seconds(self) -> dict[str, float]:
        now = time.perf_counter()
        worked = self._worked or now
        # Workers may be done before their first report arrives, but took at least as long as they say.
        longest = max((_busy_seconds(record.counts) for record in self.records), default=0.0)
        ready = max(self._begin, min(self._ready or worked, worked - longest))
        parts = {"start_up": ready - self._begin, "work": worked - ready, "commit": now - worked}
        return {"total": now - self._begin, **parts}


def _busy_seconds(counts: Counts) -> float:
    return counts.read_seconds + counts.transform_seconds + counts.write_seconds


def _noticed_in(manifest: Manifest) -> dict[str, int]:
    noticed = manifest.attributes.get("noticed", {})
    return {} if find_mismatch(noticed, {str: COUNT}) else dict(noticed)


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


def note_skipped_files(paths: Sequence[str], reading: SourceOptions) -> list[str]:
    """Notes if folders contain files that were not read, counted by extension."""
    private = [path for path in paths if is_data_name(path, reading)]
    unknown = [path for path in paths if not is_data_name(path, reading)]
    notes = []
    if unknown:
        notes.append(
            f"Skipped files with an unrecognised extension: {_kinds(unknown)} ({first_few(unknown, 1)}). "
            "If they are data, give them as paths with reading=SourceOptions(format=…), or --format."
        )
    if private:
        notes.append(
            f"Skipped files whose names, or whose folders' names, begin with an underscore: {_kinds(private)} "
            f"({first_few(private, 1)}). If they are data, give them as paths or by a glob, as in 'folder/*.txt'; "
            "images and sounds also by their format, as in --format images."
        )
    return notes


def _kinds(paths: Sequence[str]) -> str:
    kinds = collections.Counter(os.path.splitext(path)[1].lower() or "no extension" for path in paths)
    return ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common(_SHOWN_KINDS))


def note_permuted(settings: Settings, specification: Specification, rows: FirstRows | None) -> list[str]:
    """A note if samples are not in the order of the sources, and nobody requested that."""
    if settings.shuffle != "auto":
        return []
    keep = "shuffle=None (--no-shuffle) keeps the order of the sources."
    if specification.shuffle is not None:
        why = f" because column {rows.runs!r} comes in runs" if rows is not None and rows.runs is not None else ""
        return [f"Samples are stored permuted{why}: {keep}"]
    return [f"Files of class folders are stored with their classes mixed: {keep}"] if specification.file_order else []


def note_gone(previous: Previous | None, files: Sequence[SourceFile]) -> list[str]:
    """A note if files of the dataset are no longer among the sources, or are empty."""
    gone = previous.gone(files) if previous is not None else []
    if not gone:
        return []
    how = "not given" if set(gone).isdisjoint(file.path for file in files) else "not given, or empty"
    were = f"was {how}; its" if len(gone) == 1 else f"were {how}; their"
    return [
        f"{counted(len(gone), 'source file')} from the previous run {were} samples were removed ({first_few(gone, 1)})."
    ]


def note_limit(limit: int | None) -> list[str]:
    """A note on a trial."""
    if limit is None:
        return []
    return [f"A trial: only the first {counted(limit, 'sample')} of the sources, at most (limit=, --limit)."]


def note_numbers_as_text(names: Sequence[str]) -> list[str]:
    """A note if CSV columns that hold numbers are stored as text."""
    if not names:
        return []
    shown = first_few([repr(name) for name in names], _SHOWN_KINDS)
    return [
        f"Stored as text, like all CSV fields without a type: {shown}. To store numbers, pass "
        'reading=SourceOptions(types="infer"), or --types infer.'
    ]


def note_changes(files: Sequence[SourceFile]) -> list[str]:
    """A note if sources changed during the run; the dataset lists them as they were before, so a rerun reads them."""
    changed = changed_since(files)
    if not changed:
        return []
    return [f"{counted(len(changed), 'source file')} changed during the run ({first_few(changed, 1)}). Run it again."]

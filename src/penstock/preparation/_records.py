"""The record of a finished task: what it made, in Python, in a file of its own, and in the manifest.

Until the commit, a record is a file in `.preparing`, which may be forged. After it, the manifest lists
`[splits, shards]` for each task, in order; splits and shards themselves are listed elsewhere, once. What a task skipped
or noticed follows these numbers. The number of splits is negative if a task's samples were removed.

A bad row is either an error, or counted by reason and skipped; records keep the counts, and a few examples.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from penstock.errors import FormatError, SchemaError, counted
from penstock.preparation._specification import OnError, Specification
from penstock.preparation._tasks import paths_of
from penstock.shapes import COUNT, Either, find_mismatch
from penstock.shards import Runs, ShardEntry, SplitOrigin
from penstock.sources import RowError, Split

Example = tuple[str, int, str, str]
"""A bad row: path, row in its split, reason, message."""
MAX_EXAMPLES = 10
_MAX_MESSAGE = 300
_DAMAGED_FILE = "damaged_file"
_USUAL_SHARE = 0.1
"""With more bad rows than this, the sources are probably being read the wrong way."""
_ALWAYS = 10
"""Rows that may be skipped from any source, however small, if no limit is given."""


class Skipped:
    """Rows that gave no sample, under one policy."""

    def __init__(self, on_error: OnError, max_skipped: int | None) -> None:
        self._on_error = on_error
        self._max_skipped = max_skipped
        self.by_reason: dict[str, int] = {}
        self.examples: list[Example] = []

    @property
    def total(self) -> int:
        """Rows skipped so far."""
        return sum(self.by_reason.values())

    def add(self, split: Split, errors: Sequence[RowError], *, are_all: bool = False) -> None:
        """Account for bad rows; `are_all` if no row read so far was good, so that skipping them would not help.

        Raises:
            FormatError: rows may not be skipped, or too many were.
        """
        for error in errors:
            if self._on_error == "raise":
                advice = "Repair or remove the row, or skip bad rows: on_error='skip', --on-error skip."
                if are_all and len(errors) > 1:
                    advice = (
                        f"All {len(errors):,} rows read so far are bad: check how they are read, and the transform."
                    )
                raise FormatError(
                    f"{locate(split, error.row)}: {error.message.removesuffix('.')} (reason: {error.reason}). {advice}"
                )
            self._keep(error.path or split.path_of_row(error.row), error.row, error.reason, error.message)

    def add_file(self, split: Split, row: int, error: FormatError) -> None:
        """Account for a file that cannot be read from `row` on."""
        if self._on_error == "raise":
            raise error
        self._keep(split.path, row, _DAMAGED_FILE, str(error))

    def _keep(self, path: str, row: int, reason: str, message: str) -> None:
        self.by_reason[reason] = self.by_reason.get(reason, 0) + 1
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append((path, row, reason, message[:_MAX_MESSAGE]))
        check_skipped(self.by_reason, self._max_skipped)


def check_skipped(by_reason: Mapping[str, int], max_skipped: int | None) -> None:
    """Stop if more rows were skipped than allowed.

    Raises:
        FormatError: too many were; the message counts the reasons.
    """
    if max_skipped is not None and sum(by_reason.values()) > max_skipped:
        raise FormatError(
            f"{_count_reasons(by_reason)} skipped, more than max_skipped={max_skipped:,} allows. "
            "Look at the data, or raise the limit (--max-skipped); finished tasks are kept."
        )


def check_share_skipped(
    by_reason: Mapping[str, int], num_samples: int, max_skipped: int | float | None, examples: Iterable[Example]
) -> None:
    """Stop if too large a share of the rows was skipped, or all of them.

    Raises:
        FormatError: it was; the message counts the reasons, and names the first row.
    """
    num_skipped = sum(by_reason.values())
    if not num_skipped:
        return
    found = f"{_count_reasons(by_reason)} skipped, {counted(num_samples, 'sample')} made"
    first = _first_of(examples)
    if not num_samples:
        raise FormatError(f"{found}: not one row is good.{first} Check how the sources are read, and the transform.")
    is_default = max_skipped is None
    share = _USUAL_SHARE if max_skipped is None else max_skipped
    is_too_many = num_skipped > share * (num_samples + num_skipped) and not (is_default and num_skipped <= _ALWAYS)
    if is_too_many and isinstance(share, float):
        allowed = f"{'by default ' if is_default else ''}at most {share:.0%} of the rows may be skipped"
        raise FormatError(
            f"{found}; {allowed}.{first} Repair the sources, or allow more: max_skipped=0.5 (--max-skipped 0.5) is a "
            "share, max_skipped=1000 a number of rows. Finished tasks are kept."
        )


def check_kept(destination: Path, on_error: OnError, by_reason: Mapping[str, int], examples: Iterable[Example]) -> None:
    """Stop if rows may not be skipped, but tasks that would be kept have skipped some.

    Raises:
        FormatError: they have; the message names the first row.
    """
    if on_error == "raise" and by_reason:
        raise FormatError(
            f"{destination}: the dataset was made with on_error='skip' and lacks {_count_reasons(by_reason)}, but "
            f"on_error='raise' allows none.{_first_of(examples)} Repair the sources, or keep skipping bad rows: "
            "on_error='skip', --on-error skip."
        )


def _first_of(examples: Iterable[Example]) -> str:
    """A sentence on the first row, with a space before it; nothing if a stranger's record names none."""
    shown = (f" The first is {path}: row {row:,}: {message.removesuffix('.')}." for path, row, _, message in examples)
    return next(shown, "")


def _count_reasons(by_reason: Mapping[str, int]) -> str:
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(by_reason.items()))
    return f"{counted(sum(by_reason.values()), 'row')} ({reasons})"


def locate(split: Split, row: int) -> str:
    """Where a row of a split is, in words."""
    if split.paths:
        return split.path_of_row(row)
    part = f" of the part from {split.begin:,} to {split.end:,}" if split.begin else ""
    return f"{split.path}: row {row:,}{part}"


@contextlib.contextmanager
def name_file_in_schema_errors(path: str) -> Iterator[None]:
    """Prefix a `SchemaError` with the path of the file, unless it already names it."""
    try:
        yield
    except SchemaError as error:
        if str(error).startswith(path):
            raise
        raise SchemaError(f"{path}: {error}") from error


def sum_counts(by_reasons: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Counts added up, sorted by reason."""
    total: collections.Counter[str] = collections.Counter()
    for by_reason in by_reasons:
        total.update(by_reason)
    return dict(sorted(total.items()))


def merge_examples(examples: Iterable[Example]) -> list[Example]:
    """The first few of each reason, in order."""
    kept: list[Example] = []
    seen: collections.Counter[str] = collections.Counter()
    for example in examples:
        seen[example[2]] += 1
        if seen[example[2]] <= MAX_EXAMPLES:
            kept.append(example)
    return kept


Shelf = Literal["ready", "dealt", "shipped"]
"""Where the shards of finished tasks wait: for the commit, for the second pass of a shuffle, or hollow, in a store."""
SHELVES: tuple[Shelf, ...] = ("ready", "dealt", "shipped")
KEY = re.compile("[0-9a-f]{32}")
"""What the key of a task looks like."""


@dataclass(slots=True)
class Counts:
    """What was done. Each worker counts for itself, and the parent adds it up."""

    documents: int = 0
    """Samples written."""
    raw_bytes: int = 0
    """Bytes of the sources that were read."""
    tokens: int = 0
    """Elements of the column `tokens`, if there is one."""
    skipped: int = 0
    """Rows left out by `on_error="skip"`."""
    read_seconds: float = 0.0
    """Time spent reading and parsing."""
    transform_seconds: float = 0.0
    """Time spent tokenizing, decoding, or running a function."""
    write_seconds: float = 0.0
    """Time spent copying, checksumming and writing shards."""
    read_processor_seconds: float = 0.0
    """CPU time of the same; much less means waiting, for a disk or for other processes."""
    transform_processor_seconds: float = 0.0
    write_processor_seconds: float = 0.0

    @property
    def busy_seconds(self) -> float:
        """Time spent in all phases."""
        return self.read_seconds + self.transform_seconds + self.write_seconds

    def add(self, other: Counts) -> None:
        """Add another worker's counts."""
        for each in dataclasses.fields(Counts):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


_BY_REASON = {str: COUNT}
_EXAMPLES = [(str, int, str, str)]
_ON_DISK = {
    "key": KEY,
    "shelf": frozenset(SHELVES),
    "shards": [object],
    "splits": [(COUNT, Either(None, [(COUNT, COUNT, COUNT)]))],
    "skipped": _BY_REASON,
    "examples": _EXAMPLES,
    "counts": {each.name: float for each in dataclasses.fields(Counts)},
    "peak_bytes": COUNT,
}
"""The shape of a record on disk, except for its shards, which check themselves."""
_SKIPPED = (int, COUNT, _BY_REASON, _EXAMPLES)
IN_MANIFEST = Either((int, COUNT), _SKIPPED, (*_SKIPPED, _BY_REASON))
"""The shape of a record in the manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRecord:
    """What a finished task made. In a manifest, only what belongs to the dataset is kept of it."""

    splits: tuple[SplitOrigin, ...]
    """How many samples each split gave, and from which rows; `with_files` adds from which files."""
    shards: tuple[ShardEntry, ...]
    skipped: Mapping[str, int]
    """Rows left out, by reason."""
    examples: tuple[Example, ...]
    """The first of them."""
    noticed: Mapping[str, int]
    """What the transform noticed in the rows that it used."""
    is_dropped: bool = False
    """Its samples were removed; it stays in the manifest because samples refer to their splits by number."""
    key: str = ""
    shelf: Shelf = "ready"
    counts: Counts = field(default_factory=Counts)
    peak_bytes: int = 0
    """The most memory the worker had used by then."""

    @property
    def num_samples(self) -> int:
        """Samples in all shards."""
        return sum(shard.num_samples for shard in self.shards)

    @property
    def paths(self) -> set[str]:
        """Every file it read."""
        return {path for split in self.splits for path in split.paths}

    def fits(self, specification: Specification, num_splits: int) -> bool:
        """Whether a task of that many splits could have made this; a record from a stranger may not."""
        ragged = {column.name for column in specification.schema.stored.columns if column.is_ragged}
        return (
            (self.shelf == "dealt") is (specification.shuffle is not None)
            and len(self.splits) == num_splits
            and sum(split.num_samples for split in self.splits) == self.num_samples
            and all(shard.num_values.keys() == ragged for shard in self.shards)
        )

    def with_files(self, splits: Sequence[Split]) -> TaskRecord:
        """The record with the files that its task's splits name, which its file does not repeat."""
        named = (
            SplitOrigin(paths_of(split), bool(split.paths), split.begin, split.end, made.num_samples, made.rows)
            for split, made in zip(splits, self.splits, strict=True)
        )
        return dataclasses.replace(self, splits=tuple(named))

    def dropped(self) -> TaskRecord:
        """The record without its samples."""
        splits = tuple(dataclasses.replace(split, num_samples=0) for split in self.splits)
        return TaskRecord(splits=splits, shards=(), skipped={}, examples=(), noticed={}, is_dropped=True)

    def to_json(self) -> dict[str, Any]:
        """The contents of its file."""
        return {
            "key": self.key,
            "shelf": self.shelf,
            "shards": [shard.to_json() for shard in self.shards],
            "splits": [[split.num_samples, split.rows] for split in self.splits],
            "skipped": dict(self.skipped),
            "examples": [list(example) for example in self.examples],
            "noticed": dict(self.noticed),
            "counts": dataclasses.asdict(self.counts),
            "peak_bytes": self.peak_bytes,
        }

    @classmethod
    def from_json(cls, fields: Any) -> Self:
        """The inverse of `to_json`; `KeyError`, `TypeError`, `ValueError` or `AttributeError` on anything else."""
        if wrong := find_mismatch(fields, _ON_DISK) or find_mismatch(fields.get("noticed", {}), _BY_REASON):
            raise ValueError(wrong)
        return cls(
            key=fields["key"],
            shelf=fields["shelf"],
            shards=tuple(ShardEntry.from_json(entry) for entry in fields["shards"]),
            splits=tuple(without_files(num_samples, rows) for num_samples, rows in fields["splits"]),
            skipped=fields["skipped"],
            examples=tuple((path, row, reason, message) for path, row, reason, message in fields["examples"]),
            noticed=fields.get("noticed", {}),
            counts=Counts(**fields["counts"]),
            peak_bytes=fields["peak_bytes"],
        )

    def to_entry(self) -> list[Any]:
        """Its entry in the manifest: how many splits and shards it has, what it skipped, and what it noticed."""
        counts: list[Any] = [-len(self.splits) if self.is_dropped else len(self.splits), len(self.shards)]
        noticed = [dict(self.noticed)] if self.noticed else []
        if not self.skipped and not noticed:
            return counts
        return [*counts, dict(self.skipped), [list(each) for each in self.examples], *noticed]


def without_files(num_samples: int, rows: Runs) -> SplitOrigin:
    """Where the samples of a split came from, before `TaskRecord.with_files`."""
    return SplitOrigin((), False, 0, 0, num_samples, rows)


def merge_records(dealt: Sequence[TaskRecord], gathered: Iterable[TaskRecord]) -> TaskRecord:
    """A shuffled dataset as one task: every shard holds something of every split."""
    return TaskRecord(
        splits=tuple(split for record in dealt for split in record.splits),
        shards=tuple(shard for record in gathered for shard in record.shards),
        skipped=sum_counts(record.skipped for record in dealt),
        examples=tuple(merge_examples(example for record in dealt for example in record.examples)),
        noticed=sum_counts(record.noticed for record in dealt),
    )


def read_entries(
    entries: Sequence[Sequence[Any]], origins: Sequence[SplitOrigin], shards: Sequence[ShardEntry]
) -> list[TaskRecord]:
    """Records from a manifest: entries that fit `IN_MANIFEST`, the splits of all, and shards of which theirs are first.

    Raises:
        ValueError: they claim more shards than there are, or not all of the splits.
    """
    num_splits, num_shards = sum(abs(entry[0]) for entry in entries), sum(entry[1] for entry in entries)
    if num_splits != len(origins) or num_shards > len(shards):
        raise ValueError(
            f"its tasks have {num_splits:,} splits and {num_shards:,} shards, but the dataset has {len(origins):,} and "
            f"{len(shards):,}"
        )
    records = []
    split, shard = 0, 0
    for signed, num_shards, *more in entries:
        by_reason, examples = more[:2] or ({}, [])
        num_splits = abs(signed)
        records.append(
            TaskRecord(
                splits=tuple(origins[split : split + num_splits]),
                shards=tuple(shards[shard : shard + num_shards]),
                skipped=by_reason,
                examples=tuple((path, row, reason, message) for path, row, reason, message in examples),
                noticed=more[2] if len(more) > 2 else {},
                is_dropped=signed < 0,
            )
        )
        split, shard = split + num_splits, shard + num_shards
    return records

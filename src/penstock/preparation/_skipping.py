"""Bad rows: either an error that names the first, or counts by reason with a few examples."""

import collections
import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from penstock.errors import FormatError, SchemaError, counted
from penstock.preparation._specification import OnError
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

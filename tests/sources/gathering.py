"""Read sources through the room's door, as `preparation` does."""

from __future__ import annotations

import pickle
from typing import Any

from penstock.sources import Records, RowError, SourceOptions, Split, list_files, plan_splits, read_split


def gather(sources: Any, target_bytes: int = 1 << 20, **options: Any) -> tuple[list[dict[str, Any]], list[RowError]]:
    """All rows as dicts, and all bad rows, over all splits; checks what must hold for every batch."""
    settings = SourceOptions(**options)
    rows, errors = [], []
    for split in plan_splits(list_files(sources, settings), settings, target_bytes):
        for records in read_checked(split, settings):
            rows += as_dicts(records)
            errors += records.errors
    return rows, errors


def read_checked(split: Split, options: SourceOptions) -> list[Records]:
    """Batches of a split whose row numbers account for every row exactly once."""
    split = pickle.loads(pickle.dumps(Split.from_json(split.to_json())))
    batches = list(read_split(split, options))
    next_row = 0
    for records in batches:
        assert records.first_row == next_row
        assert all(len(column) == records.num_rows for column in records.columns.values())
        numbers = [*records.row_numbers().tolist(), *(error.row for error in records.errors)]
        assert sorted(numbers) == list(range(next_row, next_row + len(numbers)))
        assert records.row_numbers().tolist() == sorted(records.row_numbers().tolist())
        next_row += len(numbers)
    return batches


def as_dicts(records: Records) -> list[dict[str, Any]]:
    """Records as one dict per row."""
    columns = {
        name: column if isinstance(column, list) else column.to_pylist() for name, column in records.columns.items()
    }
    return [{name: column[place] for name, column in columns.items()} for place in range(records.num_rows)]


def values(rows: list[dict[str, Any]], name: str = "text") -> list[Any]:
    """One column of rows."""
    return [row[name] for row in rows]

"""`KeepColumns`: columns of the source become columns of the dataset, unchanged."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import SchemaError
from penstock.sources import Records
from penstock.transforms._byte_rows import is_arrow
from penstock.transforms._kept import Keep, check_keep, infer_types, read_kept, take_kept
from penstock.transforms._transform import BadRows, Output


@dataclass(frozen=True, slots=True)
class KeepColumns:
    """Store columns as they are; what `prepare` does when no transform is given.

    >>> KeepColumns({"score": "float32"}).columns()
    {'score': 'float32'}
    """

    keep: Keep | None = None
    """Names, or `{name: type}`; None keeps every column of the first rows except those starting with '__'."""
    _types: dict[str, str] | None = field(default=None, init=False, repr=False, compare=False)
    _left_out: tuple[str, ...] = field(default=(), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        pairs = check_keep(self.keep or (), ())
        if pairs and all(spec for _, spec in pairs):
            object.__setattr__(self, "_types", dict(pairs))

    @property
    def identity(self) -> dict[str, Any]:
        """What is kept."""
        keep = None if self.keep is None else [list(pair) for pair in check_keep(self.keep, ())]
        return {"transform": "KeepColumns", "version": 1, "keep": keep}

    @property
    def attributes(self) -> dict[str, Any]:
        """Nothing beyond the schema."""
        return {}

    @property
    def notes(self) -> tuple[str, ...]:
        """What was left out."""
        names = ", ".join(map(repr, self._left_out))
        return (f"Left out {names}: a column needs a name, which must not start with '__'.",) if names else ()

    @property
    def input_columns(self) -> tuple[str, ...] | None:
        """What is kept."""
        return None if self.keep is None else tuple(self.keep)

    def columns(self) -> dict[str, str] | None:
        """Types as given, or as `before_run` found them."""
        return self._types

    def before_run(self, sample: Iterable[Records]) -> KeepColumns:
        """The same, with types inferred from the first records if none were given."""
        first = next((records for records in sample if records.num_rows), None)
        if self._types is not None or first is None:
            return self
        known = copy.copy(self)
        if self.keep is None:
            left_out = tuple(name for name in first.columns if _is_bookkeeping(name))
            object.__setattr__(known, "_left_out", left_out)
            pairs = _check_all([name for name in first.columns if name not in left_out])
        else:
            pairs = check_keep(self.keep, ())
        object.__setattr__(known, "_types", infer_types(pairs, first))
        return known

    def open(self) -> _OpenKeepColumns:
        """Ready to run."""
        return _OpenKeepColumns(self)


def _is_bookkeeping(name: str) -> bool:
    """Whether a column is not part of the data: the index of pandas (unnamed in CSV), the keys of WebDataset."""
    return not name or name.startswith("__")


def _check_all(names: list[str]) -> tuple[tuple[str, str | None], ...]:
    try:
        return check_keep(names, ())
    except SchemaError as error:
        raise SchemaError(
            f"{error} Name the columns to keep (keep=, --keep), or rename it: in a CSV file with header=True and "
            "names= (--header --names), in a tar with typed_members=True (--typed-members), otherwise with a function."
        ) from None


def _check_known(records: Records, types: Mapping[str, str]) -> None:
    """Raise if a column turns up that the first rows did not have: it would be dropped silently."""
    for name, column in records.columns.items():
        if name not in types and not _is_bookkeeping(name) and not _is_empty(column):
            raise SchemaError(
                f"Column {name!r} is not in the first rows; their columns are {', '.join(map(repr, types))}. "
                "Name the columns to keep (keep=, --keep); a row without one of them is a bad row."
            )


def _is_empty(column: Any) -> bool:
    """Whether every value is null."""
    if is_arrow(column):
        return bool(column.null_count == len(column))
    return all(value is None for value in column)


class _OpenKeepColumns:
    def __init__(self, transform: KeepColumns) -> None:
        self._transform = transform

    def __call__(self, records: Records) -> Output:
        """The columns of these rows."""
        self._transform = self._transform.before_run([records])
        types = self._transform.columns() or {}
        if self._transform.keep is None:
            _check_known(records, types)
        bad = BadRows(records)
        kept = read_kept(records, types, bad)
        places = bad.good_places()
        return Output(take_kept(kept, places, records.num_rows), places, bad.errors())

"""Whether the first record of a CSV file is its header: refused if there is doubt.

A file does not say whether its first line names the columns. Taking data for names silently loses a record, and
taking names for data adds one. So unless the user said which it is, the first record is compared with the rows below
it, column by column: a number above numbers is data, and text above nothing but numbers is a name. The exception is
tables with a column for each year: `country,1990,1991`.

Nor does a file say what separates its fields. If every line is one field and contains another common separator equally
often, the file would be read as a single column, so that is refused as well.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

from penstock.errors import SchemaError

_KINDS = {
    "a number": re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?%?"),
    "a date": re.compile(r"\d{4}-\d\d?-\d\d?([T ].*)?|\d\d?[/.]\d\d?[/.](\d\d){1,2}( .*)?"),
    "a URL": re.compile(r"[a-z][a-z0-9+.-]*://\S+", re.IGNORECASE),
    "a truth value": re.compile("true|false", re.IGNORECASE),
}
_YEAR = re.compile(r"[12]\d{3}")
_MOST_YEARS_APART = 10
_LONGEST_NAME = 200
_OTHER_DELIMITERS = ";\t|"
_WAYS_OUT = (
    "If it is a record, pass reading=SourceOptions(header=False) (--no-header), or names= (--names) for the columns; "
    "if it is the header, header=True (--header)."
)

Record = Sequence[str]


def check_is_header(first: Record, rows: Sequence[Record], path: str) -> None:
    """Raise `SchemaError` if the first record may well be data.

    Args:
        first: The first record.
        rows: Some of those below it; none if the file has no more.
        path: The file, for the message.
    """
    reason = next(_signs_of_data(first, rows), None)
    if reason is not None:
        raise SchemaError(f"{path}: the first line may be data rather than a header: {reason}. {_WAYS_OUT}")


def check_delimiter(first: Record, rows: Sequence[Record], path: str, usual: str) -> None:
    """Raise `SchemaError` if no delimiter was given, and another than the usual one may separate the fields."""
    lines = [usual.join(record) for record in (first, *rows)]
    for each in _OTHER_DELIMITERS if len(first) == 1 and rows else "":
        counts = {line.count(each) for line in lines}
        if len(counts) == 1 and counts != {0}:
            raise SchemaError(
                f"{path}: the first line is one field, and every line has {each!r} equally often. If that separates "
                f"fields, pass reading=SourceOptions(delimiter={each!r}) (--delimiter); if not, delimiter={usual!r}."
            )


def guess_delimiter(names: Sequence[str]) -> str:
    """What to try if a column is missing because the whole header was taken for one name."""
    found = next((each for each in _OTHER_DELIMITERS if len(names) == 1 and each in names[0]), None)
    return f" Are its fields separated by {found!r}? Then pass delimiter={found!r} (--delimiter)." if found else ""


def check_is_data(first: Record, rows: Sequence[Record], names: Sequence[str], path: str) -> None:
    """Raise `SchemaError` if columns were named, but the first record may still be a header."""
    reason = next(_signs_of_names(first, rows, names), None)
    if reason is not None:
        raise SchemaError(
            f"{path}: names= gives the names of the columns, but the first line may be a header: {reason}. "
            "If it is, pass header=True (--header), and names= replaces it; if not, header=False (--no-header)."
        )


def _signs_of_data(first: Record, rows: Sequence[Record]) -> Iterator[str]:
    columns = list(_columns(first, rows))
    has_names = any(_stands_above_numbers(name, values) for name, values in columns)
    years = _years_in(columns)
    for name, values in columns:
        kind = None if name in years else _kind_of(name)
        if kind and (not rows or _share_of_kind(kind, values) > 0.5):
            yield f"{name!r:.40} is {kind}{', as are the values below it' if rows else ''}"
        elif name and name in values and not has_names:
            yield f"{name!r:.40} also occurs as a value in its column"
        elif len(name) > _LONGEST_NAME and not has_names:
            yield f"{name!r:.40}… is {len(name):,} characters long"
    repeated = sorted({name for name in first if list(first).count(name) > 1})
    if repeated:
        yield f"it contains {', '.join(map(repr, repeated))} more than once"


def _signs_of_names(first: Record, rows: Sequence[Record], names: Sequence[str]) -> Iterator[str]:
    if set(first) & set(names):
        yield f"it contains {', '.join(repr(name) for name in first if name in names)}"
    for name, values in _columns(first, rows):
        if _stands_above_numbers(name, values):
            yield f"{name!r:.40} is above nothing but numbers"


def _years_in(columns: Sequence[tuple[str, list[str]]]) -> set[str]:
    """The names that are years; none unless they are evenly spaced, beside another name, and above other values."""
    years = [name for name, _ in columns if _YEAR.fullmatch(name)]
    steps = {int(later) - int(earlier) for earlier, later in itertools.pairwise(years)}
    come_evenly = len(steps) == 1 and 0 < min(steps) <= _MOST_YEARS_APART
    beside_name = any(name and _kind_of(name) is None and values for name, values in columns)
    below = [value for name, values in columns if name in years for value in values]
    above_others = bool(below) and sum(bool(_YEAR.fullmatch(value)) for value in below) <= len(below) / 4
    return set(years) if come_evenly and beside_name and above_others else set()


def _stands_above_numbers(name: str, values: Sequence[str]) -> bool:
    return bool(name) and _kind_of(name) is None and _share_of_kind("a number", values) == 1


def _columns(first: Record, rows: Sequence[Record]) -> Iterator[tuple[str, list[str]]]:
    """Each field of the first record, with the non-empty values below it."""
    whole = [row for row in rows if len(row) == len(first)]
    for place, name in enumerate(first):
        yield name.strip(), [row[place].strip() for row in whole if row[place].strip()]


def _kind_of(value: str) -> str | None:
    return next((kind for kind, pattern in _KINDS.items() if pattern.fullmatch(value)), None)


def _share_of_kind(kind: str, values: Sequence[str]) -> float:
    return sum(_kind_of(value) == kind for value in values) / len(values) if values else 0.0

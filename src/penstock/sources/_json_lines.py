"""JSON lines one by one: the objects they hold, and exactly what is wrong with each bad line.

`_jsonl` turns a block into columns, in which a row also depends on its neighbours: a field that only others have is
null in it. Here an object is exactly what its own line says, wherever reading began. A whole block is scanned by
`json`'s own scanner, without cutting it into lines (2.1 µs for a record of 180 bytes; `json.loads` of each line takes
4.1); a block with anything unusual in it is parsed line by line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from penstock.errors import SchemaError
from penstock.sources._arrow import arrow, plain_values
from penstock.sources._model import Records, RowError
from penstock.sources._nested import dig, top_level, value_at

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_scan = json.JSONDecoder().raw_decode


def parse_lines(data: bytes, offset: int, path: str, first_row: int, exact: Collection[str] = ()) -> Records:
    """Records of lines that begin at byte `offset` of the file; blank lines are not rows."""
    objects, errors = parse_objects(data, offset, path, first_row)
    return Records(columns_of(objects, exact), first_row, len(objects), errors, len(data))


def parse_objects(
    data: bytes, offset: int, path: str, first_row: int
) -> tuple[list[dict[str, Any]], tuple[RowError, ...]]:
    """Objects of lines that begin at byte `offset` of the file, and bad lines; blank lines are neither."""
    objects: list[dict[str, Any]] = []
    errors: list[RowError] = []
    begin = 0
    while begin < len(data):
        end = data.find(b"\n", begin)
        end = len(data) if end < 0 else end
        try:
            value = _parse_object(data, begin, end)
            if value is not None:
                objects.append(value)
        except _BadLine as bad:
            row = first_row + len(objects) + len(errors)
            errors.append(RowError(path, row, bad.reason, f"the line at byte {offset + begin:,} {bad}."))
        begin = end + 1
    return objects, tuple(errors)


def read_objects(
    data: bytes, offset: int, path: str, columns: Sequence[str] | None
) -> tuple[list[dict[str, Any]], tuple[RowError, ...]]:
    """Objects of lines that begin at byte `offset` of the file, and bad lines; blank lines are neither."""
    errors: tuple[RowError, ...] = ()
    objects = _scan_block(data)
    if objects is None:
        objects, errors = parse_objects(data, offset, path, 0)
    if columns is not None:
        objects = [{name: value_at(each, name) for name in columns} for each in objects]
    return objects, errors


def _scan_block(data: bytes) -> list[dict[str, Any]] | None:
    """Objects of a block in which every line clearly is one; None if any line is not, or may not be."""
    if _SURROGATE.search(data):
        return None
    try:
        text = data.decode()
        if not text.endswith("\n"):
            text += "\n"
        objects = _scan_lines(text)
    except (ValueError, RecursionError, IndexError):
        return None
    # The scanner would take a newline inside an object for a space.
    is_one_per_line = len(objects) == text.count("\n")
    return objects if is_one_per_line and all(type(each) is dict for each in objects) else None


def _scan_lines(text: str) -> list[Any]:
    values = []
    place, size = 0, len(text)
    while place < size:
        value, place = _scan(text, place)
        if text[place] == "\r":
            place += 1
        if text[place] != "\n":
            raise ValueError("more than one value")
        place += 1
        values.append(value)
    return values


def columns_of(objects: Sequence[Mapping[str, Any]], exact: Collection[str]) -> dict[str, Any]:
    """Columns from dicts: Arrow arrays where the values have one type, otherwise Python lists, as are `exact` ones."""
    names = dict.fromkeys(name for each in objects for name in each)
    return {name: _column_of([each.get(name) for each in objects], name in exact) for name in names}


def select_columns(
    columns: Mapping[str, Any], num_rows: int, names: Sequence[str] | None, exact: Collection[str]
) -> Mapping[str, Any]:
    """These columns; one that no row has is null."""
    if names is None:
        return columns
    return {name: _find(columns, name, num_rows, name in exact) for name in names}


def _find(columns: Mapping[str, Any], name: str, num_rows: int, is_exact: bool) -> Any:
    root = top_level(name, columns)
    column = columns.get(root)
    if column is None:
        return arrow().nulls(num_rows)
    if isinstance(column, list) and root != name:
        return _column_of([value_at({root: value}, name) for value in column], is_exact)
    try:
        return column if root == name else dig(column, name, "", columns)
    except SchemaError:  # a field that no row of this block has
        return arrow().nulls(num_rows)


def _column_of(values: list[Any], is_exact: bool) -> Any:
    """The values as they are if they must stay so; a column without any is an Arrow one of nulls all the same."""
    return values if is_exact and any(value is not None for value in values) else array_or_list(values)


def array_or_list(values: list[Any]) -> Any:
    """An Arrow array, or the list itself if its values have no common type."""
    pa = arrow()
    try:
        return plain_values(values)
    except MemoryError:  # one of pyarrow's exceptions, too
        raise
    except (pa.ArrowException, OverflowError, ValueError, TypeError):
        return values


_HOW_TO_CUT = ". JSON lines have one object per line: `jq -c 'if type == \"array\" then .[] else . end'` writes them"


class _BadLine(Exception):
    """A line that is not an object, and one word for why."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def _parse_object(data: bytes, begin: int, end: int) -> dict[str, Any] | None:
    """The object of one line, or None for a blank one."""
    try:
        text = str(memoryview(data)[begin:end], "utf-8")  # without a copy of the line
        if not text or text.isspace():
            return None
        value = json.loads(text)
        del text
        if data.find(b"\\u", begin, end) >= 0:
            _check_surrogates(value)
    except UnicodeDecodeError as error:
        raise _BadLine("invalid_utf8", f"is not valid UTF-8 ({error.reason} at its byte {error.start})") from None
    except UnicodeEncodeError:
        raise _BadLine("invalid_utf8", "contains a lone surrogate, which is not a character") from None
    except RecursionError:
        raise _BadLine("bad_json", "is nested too deeply") from None
    except ValueError as error:
        hint = _HOW_TO_CUT if data[begin:end].strip() in (b"{", b"[") else ""
        raise _BadLine("bad_json", f"is not JSON: {error}{hint}") from None
    if not isinstance(value, dict):
        hint = _HOW_TO_CUT if isinstance(value, list) else ""
        raise _BadLine("not_an_object", f"holds {type(value).__name__}, not an object with named fields{hint}")
    return value


def _check_surrogates(value: Any) -> None:
    json.dumps(value, ensure_ascii=False).encode()

"""JSON lines one by one, with an exact answer for each that is wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.sources._arrow import arrow
from penstock.sources._model import Records, RowError


def parse_lines(data: bytes, offset: int, path: str, first_row: int) -> Records:
    """Records of lines that begin at byte `offset` of the file; blank lines are no rows."""
    objects, rows, errors = [], [], []
    row, begin = first_row, 0
    while begin < len(data):
        end = data.find(b"\n", begin)
        end = len(data) if end < 0 else end
        try:
            value = parse_object(data, begin, end)
            if value is not None:
                objects.append(value)
                rows.append(row)
                row += 1
        except BadLine as bad:
            errors.append(RowError(path, row, bad.reason, f"the line at byte {offset + begin:,} {bad}."))
            row += 1
        begin = end + 1
    numbers = np.array(rows, np.int64) if errors else None
    return Records(columns_of(objects), first_row, len(objects), tuple(errors), numbers, len(data))


def columns_of(objects: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Columns of dicts: Arrow arrays where the values have one type, else Python lists."""
    names = dict.fromkeys(name for each in objects for name in each)
    return {name: array_or_list([each.get(name) for each in objects]) for name in names}


def select_columns(columns: Mapping[str, Any], num_rows: int, names: Sequence[str] | None) -> Mapping[str, Any]:
    """These columns; one that no row has is null."""
    if names is None:
        return columns
    return {name: columns[name] if name in columns else arrow().nulls(num_rows) for name in names}


def array_or_list(values: list[Any]) -> Any:
    """An Arrow array, or the list itself when its values have no common type."""
    pa = arrow()
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError, ValueError, TypeError):
        return values


class BadLine(Exception):
    """A line that holds no object, and one word for why."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def parse_object(data: bytes, begin: int, end: int) -> dict[str, Any] | None:
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
        raise BadLine("invalid_utf8", f"is not valid UTF-8 ({error.reason} at its byte {error.start})") from None
    except UnicodeEncodeError:
        raise BadLine("invalid_utf8", "holds half of a surrogate pair, which is no character") from None
    except RecursionError:
        raise BadLine("bad_json", "nests too deeply") from None
    except ValueError as error:
        raise BadLine("bad_json", f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadLine("not_an_object", f"holds {type(value).__name__}, not an object with named fields")
    return value


def _check_surrogates(value: Any) -> None:
    json.dumps(value, ensure_ascii=False).encode()

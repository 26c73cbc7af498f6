"""JSON lines one by one, with an exact answer for each that is wrong."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.sources._arrow import arrow
from penstock.sources._model import Records, RowError


def parse_lines(data: bytes, offset: int, path: str, first_row: int, columns: Sequence[str] | None) -> Records:
    """Records of lines that begin at byte `offset` of the file; blank lines are no rows."""
    objects, rows, errors = [], [], []
    row = first_row
    for line in data.split(b"\n"):
        if line.strip():
            try:
                objects.append(_parse_object(line))
                rows.append(row)
            except _BadLine as bad:
                message = f"the line at byte {offset:,} {bad}."
                errors.append(RowError(path, row, bad.reason, message))
            row += 1
        offset += len(line) + 1
    numbers = np.array(rows, np.int64) if errors else None
    return Records(columns_of(objects, columns), first_row, len(objects), tuple(errors), numbers, len(data))


def columns_of(objects: Sequence[dict[str, Any]], names: Sequence[str] | None) -> dict[str, Any]:
    """Columns of dicts: Arrow arrays where the values have one type, else Python lists."""
    if names is None:
        names = list(dict.fromkeys(name for each in objects for name in each))
    return {name: _column([each.get(name) for each in objects]) for name in names}


def _column(values: list[Any]) -> Any:
    pa = arrow()
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError, ValueError, TypeError):
        return values


class _BadLine(Exception):
    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def _parse_object(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line.decode())
        if b"\\u" in line:
            _check_surrogates(value)
    except UnicodeDecodeError as error:
        raise _BadLine("invalid_utf8", f"is not valid UTF-8 ({error.reason} at its byte {error.start})") from None
    except UnicodeEncodeError:
        raise _BadLine("invalid_utf8", "holds half of a surrogate pair, which is no character") from None
    except RecursionError:
        raise _BadLine("bad_json", "nests too deeply") from None
    except ValueError as error:
        raise _BadLine("bad_json", f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise _BadLine("not_an_object", f"holds {type(value).__name__}, not an object with named fields")
    return value


def _check_surrogates(value: Any) -> None:
    json.dumps(value, ensure_ascii=False).encode()

"""JSON lines: by pyarrow a block at a time, line by line only where a block is not plain.

pyarrow's reader makes string arrays without a Python object per row, but it tells of one bad line by refusing
the block, reads two objects on one line as two rows, turns text that looks like a date into a timestamp and large
integers into floats, loses nulls in lists, and crashes on deep nesting. So a block goes the fast way only when
each line looks like one object and what comes out has a row per line and none of those; all other blocks go
through `json.loads`, which says exactly which row is wrong. Both ways give the same values.

Types are learned from the blocks before: giving them to pyarrow saves the guessing, and with `columns` the
rest of each line is not even built.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from penstock.sources._arrow import arrow, plain_array
from penstock.sources._blocks import Block
from penstock.sources._json_rows import parse_lines
from penstock.sources._model import Records, RowError

_BOM = b"\xef\xbb\xbf"
_NEWLINE, _RETURN, _OPEN, _CLOSE, _OPEN_LIST = b"\n\r{}["
# A line with fewer opening brackets cannot nest deep enough to hurt pyarrow (10,000 levels end the process).
_MAX_BRACKETS = 500
_LARGEST_EXACT_FLOAT = 2.0**53


def read_jsonl(blocks: Iterator[Block], path: str, columns: Sequence[str] | None) -> Iterator[Records]:
    """Records of blocks of lines, with row numbers that count lines that are not blank."""
    reader = _FastReader(columns)
    row = 0
    for block in blocks:
        if block.dropped_bytes:
            records = _too_long(block, path, row)
        else:
            records = _read_block(block, path, row, reader)
        row += records.num_rows + len(records.errors)
        if records.num_rows or records.errors:
            yield records


def _too_long(block: Block, path: str, row: int) -> Records:
    message = f"the line at byte {block.offset:,} has {block.dropped_bytes:,} bytes, more than max_record_bytes."
    return Records({}, row, 0, (RowError(path, row, "too_long", message),), None, block.dropped_bytes)


def _read_block(block: Block, path: str, row: int, reader: _FastReader) -> Records:
    data = block.data.removeprefix(_BOM) if block.offset == 0 else block.data
    table = reader.read(data)
    if table is None:
        offset = block.offset + len(block.data) - len(data)
        return parse_lines(data, offset, path, row, reader.columns)
    arrays = {name: plain_array(column) for name, column in zip(table.column_names, table.columns, strict=True)}
    return Records(arrays, row, table.num_rows, num_bytes=len(block.data))


class _FastReader:
    """pyarrow's reader, with what it has learned about the columns."""

    def __init__(self, columns: Sequence[str] | None) -> None:
        self.columns = None if columns is None else tuple(columns)
        self._types: dict[str, Any] = {}

    def read(self, data: bytes) -> Any:
        """A table with a row per line, or None when this block needs `json.loads`."""
        num_lines = _count_plain_lines(data)
        if num_lines is None or not _is_utf8(data):
            return None
        table = self._read_with_known_types(data)
        if table is None:
            table = self._read_and_learn(data)
        if table is None or table.num_rows != num_lines or _is_doubtful(table, data):
            return None
        return table

    def _read_with_known_types(self, data: bytes) -> Any:
        if not self._types or not set(self.columns or ()) <= self._types.keys():
            return None
        if self.columns is None:
            return _parse(data, self._types, unexpected="error")
        chosen = {name: self._types[name] for name in self.columns}
        # "ignore" would also leave out new fields inside a known struct, so it is for flat columns only.
        if any(arrow().types.is_nested(kind) for kind in chosen.values()):
            return None
        return _parse(data, chosen, unexpected="ignore")

    def _read_and_learn(self, data: bytes) -> Any:
        if _max_brackets(data) > _MAX_BRACKETS:
            return None
        table = _parse(data, {}, unexpected="infer")
        if table is not None:
            types = {field.name: _without_timestamps(field.type) for field in table.schema}
            if types != {field.name: field.type for field in table.schema}:
                table = _parse(data, types, unexpected="infer")
            self._types = {name: kind for name, kind in types.items() if not _has_nulls(kind)}
        return None if table is None else self._select(table)

    def _select(self, table: Any) -> Any:
        if self.columns is None:
            return table
        pa = arrow()
        nulls = pa.nulls(table.num_rows)
        return pa.table({name: table[name] if name in table.column_names else nulls for name in self.columns})


def _parse(data: bytes, types: dict[str, Any], *, unexpected: str) -> Any:
    pa, json = arrow(), arrow("json")
    try:
        return json.read_json(
            pa.BufferReader(data),
            read_options=json.ReadOptions(use_threads=False, block_size=len(data)),
            parse_options=json.ParseOptions(
                explicit_schema=pa.schema(list(types.items())) if types else None, unexpected_field_behavior=unexpected
            ),
        )
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None


def _count_plain_lines(data: bytes) -> int | None:
    """Number of lines, when each looks like one object; None when one does not, or is blank."""
    values = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(values == _NEWLINE)
    if not len(values):
        return None
    if not len(ends) or ends[-1] != len(values) - 1:
        ends = np.append(ends, len(values))
    starts = np.concatenate([[0], ends[:-1] + 1])
    lasts = ends - 1
    lasts = np.where(values[lasts] == _RETURN, lasts - 1, lasts)
    if (lasts <= starts).any() or (values[starts] != _OPEN).any() or (values[lasts] != _CLOSE).any():
        return None
    return len(ends)


def _max_brackets(data: bytes) -> int:
    """The most opening brackets in a line, those inside strings included; at least that when few."""
    if data.count(b"{") + data.count(b"[") <= _MAX_BRACKETS:
        return 0
    values = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(values == _NEWLINE)
    brackets = np.flatnonzero((values == _OPEN) | (values == _OPEN_LIST))
    return int(np.bincount(np.searchsorted(ends, brackets)).max())


def _is_utf8(data: bytes) -> bool:
    pa = arrow()
    ends = pa.py_buffer(np.array([0, len(data)], np.int64))
    try:
        pa.LargeStringArray.from_buffers(1, ends, pa.py_buffer(data)).validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _without_timestamps(kind: Any) -> Any:
    """The type with strings where pyarrow saw dates."""
    pa = arrow()
    if pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _without_timestamps(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(_without_timestamps(kind.value_type))
    return kind


def _has_nulls(kind: Any) -> bool:
    """Whether a part of the type is not known yet, having been null in every row."""
    pa = arrow()
    if pa.types.is_struct(kind):
        return not kind.num_fields or any(_has_nulls(field.type) for field in kind)
    return bool(pa.types.is_null(kind)) or (bool(pa.types.is_list(kind)) and _has_nulls(kind.value_type))


def _is_doubtful(table: Any, data: bytes) -> bool:
    """Whether a column may differ from what the lines say.

    pyarrow 26 reads `[null, false]` as `[false, false]`, so nested columns and nulls do not go together.
    """
    is_nested = any(arrow().types.is_nested(column.type) for column in table.columns)
    return (is_nested and (b"null" in data or any(_has_nulls(column.type) for column in table.columns))) or any(
        _has_rounded_integers(column) for column in table.columns
    )


def _has_rounded_integers(column: Any) -> bool:
    """Whether a column of floats may have been one of integers too large for a float."""
    pa, compute = arrow(), arrow("compute")
    if pa.types.is_nested(column.type):
        return any(_has_rounded_integers(inner) for inner in _parts(column))
    if not pa.types.is_floating(column.type):
        return False
    largest = compute.max(compute.abs(column)).as_py()
    return largest is not None and largest >= _LARGEST_EXACT_FLOAT


def _parts(column: Any) -> list[Any]:
    """The columns inside a struct or list."""
    pa, compute = arrow(), arrow("compute")
    if pa.types.is_struct(column.type):
        return [compute.struct_field(column, number) for number in range(column.type.num_fields)]
    return [compute.list_flatten(column)]

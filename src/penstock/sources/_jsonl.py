"""JSON lines: columns by pyarrow a block at a time, objects by `json`, line by line only if a block is unusual.

pyarrow's reader makes string arrays without a Python object per row. But left to guess, it turns text that
looks like a date into a timestamp and crashes on deep nesting; it rejects a whole block for one bad line,
reads two objects on one line as two rows, rounds large integers among floats, and loses nulls in
lists. So it never guesses: the first lines go through `json.loads`, and pyarrow is given the types found there. A
block that does not fit them, or in which one of those mistakes is possible, goes through `json.loads`, which says
exactly which row is wrong and teaches new types. Both ways give the same values.

Measured on Python sources, per CPU second on a busy machine: 310-350 MB/s from file to array (pyarrow's parser
alone 390-490), about 235 when every block goes through `json.loads`; 180 on rows of 80 bytes.

In columns, a row also depends on its neighbours: a field that only others have is null in it. A dict is exactly what
its own line says, wherever reading began. A whole block is scanned by `json`'s own scanner, without cutting it into
lines (2.1 µs for a record of 180 bytes; `json.loads` of each line takes 4.1).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.errors import SchemaError
from penstock.sources._arrow import (
    array_or_list,
    arrow,
    dig,
    names_within,
    plain_array,
    top_level,
    value_at,
    with_roots,
)
from penstock.sources._blocks import Block, record_blocks
from penstock.sources._files import without_mark
from penstock.sources._model import Records, RowError, Rows, Split
from penstock.sources._options import SourceOptions

_SAMPLE_BYTES = 64 << 10
_NEWLINE, _RETURN, _OPEN, _CLOSE = b"\n\r{}"
_LARGEST_EXACT_FLOAT = 2.0**53
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_HOW_TO_CUT = ". JSON lines have one object per line: `jq -c 'if type == \"array\" then .[] else . end'` writes them"
_scan = json.JSONDecoder().raw_decode


def read_jsonl(split: Split, options: SourceOptions) -> Iterator[Records]:
    """Records of lines, with row numbers that count lines that are not blank."""
    reader = _FastReader(options.columns, with_roots(options.exact))
    row = 0
    for block in record_blocks(split, options, b"\n", None, on_long="drop"):
        records = _read_block(block, split.path, row, reader)
        row += records.num_rows + len(records.errors)
        if records.num_rows or records.errors:
            yield records


def read_jsonl_rows(split: Split, options: SourceOptions, place: int | None) -> Iterator[Rows]:
    """Objects of lines."""
    for block in record_blocks(split, options, b"\n", place, on_long="raise"):
        objects, errors = _parse_objects(*_lines_of(block, split.path), split.path, 0)
        if options.columns is not None:
            objects = [{name: value_at(each, name) for name in options.columns} for each in objects]
        yield Rows(block.offset, objects, errors, end=block.offset + len(block.data))


def _lines_of(block: Block, path: str) -> tuple[bytes, int]:
    """The lines of a block, and the byte at which they begin: after the byte-order mark at the start of a file."""
    data = without_mark(block.data, path) if block.offset == 0 else block.data
    return data, block.offset + len(block.data) - len(data)


def _read_block(block: Block, path: str, row: int, reader: _FastReader) -> Records:
    if block.dropped_bytes:
        return block.too_long(path, row, "line")
    data, offset = _lines_of(block, path)
    if not reader.has_types:
        first, _ = _parse_objects(data[: data.rfind(b"\n", 0, _SAMPLE_BYTES) + 1], 0, path, row)
        reader.learn(_columns_of(first, ()))
    arrays = reader.read(data)
    if arrays is not None:
        num_rows = len(next(iter(arrays.values())))
        return Records(arrays, row, num_rows, num_bytes=len(block.data), known=reader.known_if_absent(arrays))
    objects, errors = _parse_objects(data, offset, path, row)
    columns = _columns_of(objects, reader.exact)
    reader.learn(columns)
    chosen = _select_columns(columns, len(objects), reader.columns, reader.exact)
    return Records(chosen, row, len(objects), errors, len(block.data), reader.known_if_absent(chosen))


def _parse_objects(
    data: bytes, offset: int, path: str, first_row: int
) -> tuple[list[dict[str, Any]], tuple[RowError, ...]]:
    """Objects of lines that begin at byte `offset` of the file, and bad lines; blank lines are neither."""
    scanned = _scan_block(data)
    if scanned is not None:
        return scanned, ()
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


def _scan_block(data: bytes) -> list[dict[str, Any]] | None:
    """Objects of a block in which every line clearly is one; None if any line is not, or may not be."""
    if _SURROGATE.search(data):
        return None
    objects: list[Any] = []
    place = 0
    try:
        text = data.decode()
        size = len(text)
        while place < size:
            value, place = _scan(text, place)
            objects.append(value)
            if place == size:
                break
            if text[place] == "\r":
                place += 1
            if text[place] != "\n":
                return None
            place += 1
    except (ValueError, RecursionError, IndexError):
        return None
    # The scanner would take a newline inside an object for a space.
    is_one_per_line = len(objects) == text.count("\n") + (not text.endswith("\n"))
    return objects if is_one_per_line and all(type(each) is dict for each in objects) else None


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
            json.dumps(value, ensure_ascii=False).encode()
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


def _columns_of(objects: Sequence[Mapping[str, Any]], exact: Collection[str]) -> dict[str, Any]:
    """Columns from dicts: Arrow arrays where the values have one type, otherwise Python lists, as are `exact` ones."""
    names = dict.fromkeys(name for each in objects for name in each)
    return {name: _column_of([each.get(name) for each in objects], name in exact) for name in names}


def _select_columns(
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


class _FastReader:
    """pyarrow's reader, with the types seen in earlier blocks."""

    def __init__(self, columns: Sequence[str] | None, exact: Sequence[str]) -> None:
        self.columns = None if columns is None else tuple(columns)
        self.exact = tuple(exact)
        self._types: dict[str, Any] = {}
        self._mixed: set[str] = set()  # names of columns without one type

    @property
    def has_types(self) -> bool:
        """Whether anything was learned."""
        return bool(self._types)

    def learn(self, columns: Mapping[str, Any]) -> None:
        """Remember the types of columns that have one."""
        for name, column in columns.items():
            if isinstance(column, list):
                self._mixed.add(name)
                if name not in self.exact:
                    self._types.pop(name, None)
            else:
                self._types[name] = _widest(self._types.get(name), column.type)

    def known_if_absent(self, chosen: Mapping[str, Any]) -> tuple[str, ...]:
        """All names seen so far, if a requested column has no value in this block."""
        if not any(str(getattr(column, "type", "")) == "null" for column in chosen.values()):
            return ()
        return tuple(names_within({**dict.fromkeys(self._mixed), **self._types}))

    def read(self, data: bytes) -> dict[str, Any] | None:
        """Columns with a row per line, or None if this block needs `json.loads`."""
        if self.exact or not self._types or not self._types.keys() >= self._needed:
            return None
        num_lines = _count_plain_lines(data)
        if num_lines is None or not _is_utf8(data):
            return None
        table = self._parse(data)
        if table is None or table.num_rows != num_lines or _is_doubtful(table, data):
            return None
        arrays = {name: plain_array(table[name]) for name in self._needed or table.column_names}
        return dict(_select_columns(arrays, num_lines, self.columns, ()))

    @property
    def _needed(self) -> set[str]:
        """The top-level columns that hold the requested ones."""
        return {top_level(name, self._types) for name in self.columns or ()}

    def _parse(self, data: bytes) -> Any:
        pa, reader = arrow(), arrow("json")
        chosen = {name: self._types[name] for name in self._needed}
        # "ignore" would also drop new fields inside a struct, so it is only for flat columns.
        is_flat = bool(chosen) and not any(map(pa.types.is_nested, chosen.values()))
        schema = pa.schema(list((chosen if is_flat else self._types).items()))
        try:
            return reader.read_json(
                pa.BufferReader(data),
                read_options=reader.ReadOptions(use_threads=False, block_size=len(data)),
                parse_options=reader.ParseOptions(
                    explicit_schema=schema, unexpected_field_behavior="ignore" if is_flat else "error"
                ),
            )
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):  # not of these types, or of none that Arrow casts to
            return None


def _count_plain_lines(data: bytes) -> int | None:
    """Number of lines, if each looks like one object; None if any does not, or is blank."""
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


def _is_utf8(data: bytes) -> bool:
    pa = arrow()
    ends = pa.py_buffer(np.array([0, len(data)], np.int64))
    try:
        pa.LargeStringArray.from_buffers(1, ends, pa.py_buffer(data)).validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _widest(old: Any, new: Any) -> Any:
    """A type that can hold the values of both, or else the newer one."""
    pa = arrow()
    if old is None or old == new:
        return new
    try:
        schemas = [pa.schema([("x", kind)]) for kind in (old, new)]
        return pa.unify_schemas(schemas, promote_options="permissive").field("x").type
    except pa.ArrowException:
        return new


def _has_nulls(kind: Any) -> bool:
    """Whether part of the type is still unknown, because it was null in every row."""
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
    if pa.types.is_struct(column.type):
        fields = range(column.type.num_fields)
        return any(_has_rounded_integers(compute.struct_field(column, number)) for number in fields)
    if pa.types.is_nested(column.type):
        return _has_rounded_integers(compute.list_flatten(column))
    if not pa.types.is_floating(column.type):
        return False
    largest = compute.max(compute.abs(column)).as_py()
    return largest is not None and largest >= _LARGEST_EXACT_FLOAT

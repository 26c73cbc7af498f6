"""Where an Arrow IPC file keeps its columns: the bytes of every record batch, found without reading them.

    stream   schema message | batch message, body | batch message, body | ... | end mark
    file     "ARROW1", padding, then the same; the footer repeats what is known by then

Only messages are read, a few hundred bytes each, by positioned reads; bodies are skipped. pyarrow parses the schema.
Batch messages are parsed here, in 10 us each: pyarrow would decompress what a stranger says is small, and hand out
buffers that nobody compared with the file. Here every place comes from a number that was compared with the file's size.
Files without an end mark are refused: their writer was killed, and what they lack would be lost silently.

Layouts: Arrow's `format/Message.fbs` and `Schema.fbs`. A flatbuffer's table begins with the distance to its vtable,
which says where each of its fields is, or 0 for a field that has the default.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import FormatError, SchemaError, counted
from penstock.filesystem import PositionedFile
from penstock.schema import Column, dtype_from_name
from penstock.shards._layout import checksum

Int64 = NDArray[np.int64]
_Batch = tuple[int, bytes, bytes, int, int]
"""Rows, nodes, buffers; first byte and size of the body."""
_MAGIC = b"ARROW1\0\0"
_CONTINUES = 0xFFFFFFFF
_MOST_MESSAGE_BYTES = 16 << 20
_AT_ONCE = 4096
_SCHEMA, _RECORD_BATCH = 1, 3
_VERSIONS = (3, 4)  # V4, and V5 since Arrow 1.0
_UNCOUNTED = ("string_view", "binary_view", "list_view", "large_list_view", "run_end_encoded")
"""Types whose buffers cannot be told from the schema alone."""
_DAMAGED = (ValueError, struct.error, OverflowError)


class IpcFile(NamedTuple):
    """The record batches of one file."""

    schema: Any
    """pyarrow's."""
    num_bytes: int
    num_rows: Int64
    nodes: Int64
    """Of each batch and each array in it, nested ones included: length, missing values."""
    buffers: Int64
    """Of each batch and each buffer in it: first byte in the file, number of bytes."""
    message_checksum: int


class Place(NamedTuple):
    """Which arrays and buffers of a batch make up a column."""

    column: Column
    rows: tuple[tuple[int, int], ...]
    """Arrays in which a row may be missing, and the buffer of each that says which are there."""
    inner: tuple[int, ...]
    """Arrays in which nothing may be missing."""
    values: int
    """The buffer of numbers, or of all strings side by side."""
    offsets: int | None
    offset_bytes: int
    are_bits: bool


def read_ipc(file: PositionedFile) -> IpcFile:
    """The batches of a file.

    Raises:
        FormatError: it is no Arrow IPC file, damaged, truncated, compressed, or of a kind that cannot be mapped.
    """
    at = len(_MAGIC) if _peek(file, 0, len(_MAGIC)) == _MAGIC else 0
    schema: Any = None
    width, summed = (0, 0), 0
    batches: list[_Batch] = []
    try:
        while (raw := _read_message(file, at)) is not None:
            message = _Table(raw, _number("<I", raw, 0))
            body_at, body_bytes = at + 8 + len(raw), message.number(3, "<q")
            if message.number(0, "<h") not in _VERSIONS or not 0 <= body_bytes <= file.size - body_at:
                raise ValueError(f"a body of {body_bytes:,} bytes, of which {file.size - body_at:,} are there")
            kind = message.number(1, "<B")
            if schema is None:
                schema = _parse_schema(kind, message, _peek(file, at, body_at - at))
                width = _width_of(schema)
            elif kind == _RECORD_BATCH:
                batches.append((*_parse_batch(message.table(2), width), body_at, body_bytes))
            summed = checksum(raw, summed)
            at = body_at + body_bytes
        if schema is None:
            raise ValueError("it has no schema")
        return _collect(file, schema, batches, width, summed)
    except _DAMAGED as error:
        raise FormatError(
            f"{file.path}: at byte {at:,}, this is not an Arrow IPC file that can be mapped: {error}. Fetch or write "
            "it again; `penstock prepare` may read what cannot be mapped."
        ) from None


def _collect(file: PositionedFile, schema: Any, batches: list[_Batch], width: tuple[int, int], summed: int) -> IpcFile:
    count = len(batches)
    num_rows, begins, sizes = (np.array([batch[part] for batch in batches], np.int64) for part in (0, 3, 4))
    nodes = np.frombuffer(b"".join(batch[1] for batch in batches), "<i8").reshape(count, width[0], 2)
    buffers = np.frombuffer(b"".join(batch[2] for batch in batches), "<i8").reshape(count, width[1], 2).copy()
    firsts, lengths, sizes = buffers[:, :, 0], buffers[:, :, 1], sizes[:, None]
    if (buffers < 0).any() or (nodes < 0).any() or (firsts > sizes).any() or (lengths > sizes - firsts).any():
        raise ValueError("a batch has buffers outside of its body")
    firsts += begins[:, None]
    return IpcFile(schema, file.size, num_rows, nodes, buffers, summed)


def _peek(file: PositionedFile, at: int, num_bytes: int) -> bytes:
    return file.read(at, max(at, min(at + num_bytes, file.size))).tobytes()


def _read_message(file: PositionedFile, at: int) -> bytes | None:
    """The metadata of the message at a byte; None for the end mark."""
    head = _peek(file, at, _AT_ONCE)
    if not head:
        raise ValueError("it ends without an end mark, as if its writer had been killed")
    mark, num_bytes = _number("<I", head, 0), _number("<i", head, 4)
    if mark != _CONTINUES:
        raise ValueError("no message begins here (or one as Arrow wrote them before 0.15)")
    if num_bytes == 0:
        return None
    if not 0 < num_bytes <= min(_MOST_MESSAGE_BYTES, file.size - at - 8):
        raise ValueError(f"a message of {num_bytes:,} bytes")
    return head[8 : 8 + num_bytes] if num_bytes <= len(head) - 8 else _peek(file, at + 8, num_bytes)


def _parse_schema(kind: int, message: _Table, raw: bytes) -> Any:
    import pyarrow

    if kind != _SCHEMA:
        raise ValueError("it does not begin with a schema")
    if message.table(2).number(0, "<h") != 0:
        raise ValueError("its numbers are big-endian")
    try:
        schema = pyarrow.ipc.read_schema(pyarrow.py_buffer(raw))
        schema.to_string(
            show_field_metadata=False, show_schema_metadata=False
        )  # decodes all names, which may not be text
        return schema
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"pyarrow cannot read its schema: {error}") from None


def _parse_batch(batch: _Table, width: tuple[int, int]) -> tuple[int, bytes, bytes]:
    """(rows, nodes, buffers) of a batch."""
    if batch.place(3):
        raise ValueError("its buffers are compressed")
    num_rows, nodes, buffers = batch.number(0, "<q"), batch.pairs(1), batch.pairs(2)
    if num_rows < 0 or (len(nodes), len(buffers)) != (16 * width[0], 16 * width[1]):
        raise ValueError(f"a batch of {num_rows:,} rows whose arrays are not those of the schema")
    return num_rows, nodes, buffers


class _Table:
    """A table of a flatbuffer that nobody checked: what is read lies in its bytes, or an error is raised."""

    __slots__ = ("_at", "_raw", "_vtable")

    def __init__(self, raw: bytes, at: int) -> None:
        self._raw, self._at = raw, at
        self._vtable = at - _number("<i", raw, at)

    def place(self, field: int) -> int:
        """Where a field is; 0 if it has its default."""
        if 4 + 2 * field >= _number("<H", self._raw, self._vtable):
            return 0
        distance = _number("<H", self._raw, self._vtable + 4 + 2 * field)
        return self._at + distance if distance else 0

    def number(self, field: int, form: str) -> int:
        """A field that is a number, 0 by default."""
        place = self.place(field)
        return _number(form, self._raw, place) if place else 0

    def table(self, field: int) -> _Table:
        """A field that is a table."""
        place = self.place(field)
        return _Table(self._raw, place + _number("<I", self._raw, place))

    def pairs(self, field: int) -> bytes:
        """A field that is a list of pairs of int64."""
        if not (place := self.place(field)):
            return b""
        begin = place + _number("<I", self._raw, place)
        found = self._raw[begin + 4 : begin + 4 + 16 * _number("<I", self._raw, begin)]
        if len(found) % 16 or len(found) != 16 * _number("<I", self._raw, begin):
            raise ValueError("a list that ends outside of its message")
        return found


def _number(form: str, raw: bytes, at: int) -> int:
    if at < 0:
        raise ValueError("a place outside of its message")
    number: int = struct.unpack_from(form, raw, at)[0]
    return number


def _width_of(fields: Iterable[Any]) -> tuple[int, int]:
    """(arrays, buffers) that columns have in a batch."""
    types, num_nodes, num_buffers = _types(), 0, 0
    for field in fields:
        field.name.encode()  # a name that is no text is an error here, not wherever it is shown
        kind = getattr(field.type, "storage_type", field.type)
        if types.is_union(kind) or str(kind).startswith(_UNCOUNTED):
            raise ValueError(f"a column of type {kind!s:.80}")
        own, inner = (3 if _is_text(kind) else 2), (0, 0)
        if not types.is_dictionary(kind):
            inner = _width_of(kind.field(place) for place in range(kind.num_fields))
            own = 0 if types.is_null(kind) else own - (types.is_struct(kind) or types.is_fixed_size_list(kind))
        num_nodes, num_buffers = num_nodes + 1 + inner[0], num_buffers + own + inner[1]
    return num_nodes, num_buffers


def find_places(schema: Any) -> tuple[dict[str, Place], dict[str, str]]:
    """(where each column is, why others cannot be opened)."""
    found: dict[str, Place] = {}
    refused: dict[str, str] = {}
    node = buffer = 0
    for field in schema:
        try:
            if field.name in found or field.name in refused:
                raise SchemaError("two columns have this name")
            found[field.name] = _find(field.name, field.type, node, buffer)
        except (SchemaError, UnicodeDecodeError) as error:
            found.pop(field.name, None)
            refused[field.name] = str(error)
        nodes, buffers = _width_of([field])
        node, buffer = node + nodes, buffer + buffers
    return found, refused


def _find(name: str, kind: Any, node: int, buffer: int) -> Place:
    """Where a column is whose first array and buffer these are; `SchemaError` if it cannot be a column of a dataset."""
    types = _types()
    if types.is_struct(kind) and {field.name for field in kind} == {"bytes", "path"}:  # an image or sound of `datasets`
        inside = kind.get_field_index("bytes")
        nodes, buffers = _width_of(kind.field(place) for place in range(inside))
        place = _find(name, kind.field(inside).type, node + 1 + nodes, buffer + 1 + buffers)
        return place._replace(rows=((node, buffer), *place.rows))
    if _is_text(kind):
        width = 8 if types.is_large_string(kind) or types.is_large_binary(kind) else 4
        return Place(Column.parse(name, "bytes"), ((node, buffer),), (), buffer + 2, buffer + 1, width, False)
    if types.is_list(kind) or types.is_large_list(kind):
        spec, inner, values, are_bits = _numbers(kind.value_type, node + 1, buffer + 2, "*")
        width = 4 if types.is_list(kind) else 8
        return Place(Column.parse(name, spec), ((node, buffer),), inner, values, buffer + 1, width, are_bits)
    spec, (_, *inside), values, are_bits = _numbers(kind, node, buffer)
    return Place(Column.parse(name, spec), ((node, buffer),), tuple(inside), values, None, 0, are_bits)


def _numbers(kind: Any, node: int, buffer: int, *sizes: str) -> tuple[str, tuple[int, ...], int, bool]:
    """(type of the column, arrays, buffer of the numbers, whether they are bits) of numbers of a fixed shape."""
    types, nodes = _types(), [node]
    while types.is_fixed_size_list(kind):
        sizes, kind = (*sizes, str(kind.list_size)), kind.value_type
        node, buffer = node + 1, buffer + 1
        nodes.append(node)
    if types.is_fixed_size_binary(kind):
        sizes, name = (*sizes, str(kind.byte_width)), "uint8"
    elif types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
        name = np.dtype(kind.to_pandas_dtype()).name
    else:
        raise SchemaError(f"{kind!s:.80} cannot be read in place")
    dtype_from_name(name)
    if types.is_boolean(kind) and len(sizes) > (sizes[:1] == ("*",)):
        raise SchemaError(f"bits of shape {list(sizes)} cannot be read in place")
    return name + (f"[{','.join(sizes)}]" if sizes else ""), tuple(nodes), buffer + 1, types.is_boolean(kind)


def _is_text(kind: Any) -> bool:
    types = _types()
    return bool(
        types.is_string(kind) or types.is_binary(kind) or types.is_large_string(kind) or types.is_large_binary(kind)
    )


def _types() -> Any:
    import pyarrow.types

    return pyarrow.types


def check_batches(file: IpcFile, place: Place, path: object) -> None:
    """Refuse batches whose buffers are too short for their rows, so that only offsets remain to be checked.

    Raises:
        FormatError: naming the column.
    """
    values, column = file.buffers[:, place.values, 1], place.column
    if place.offsets is not None:
        offsets = file.buffers[:, place.offsets, 1]
        are_long = (offsets // place.offset_bytes > file.num_rows) | (file.num_rows == 0)
    else:
        items = values * 8 if place.are_bits else values // max(1, column.item_bytes)
        are_long = (items >= file.num_rows) | (column.item_bytes == 0)
    are_long &= file.nodes[:, place.rows[0][0], 0] == file.num_rows
    if not are_long.all():
        batch = int(np.flatnonzero(~are_long)[0])
        raise FormatError(
            f"{path}: column {column.name!r} has too few bytes for the {counted(int(file.num_rows[batch]), 'row')} of "
            f"batch {batch:,}. The file is damaged."
        )

"""Columns of Arrow files, read in place: a record batch is like a shard whose columns are views of a map.

    messages of all files -> starts, places -> a read touches a batch -> its offsets are checked -> the table says READY

Numbers and bytes stay where they are in the mapped file, which kernels read by address. What is not copied is not
trusted either: all places were compared with the file's size (`_ipc`), and the offsets of a batch are compared with its
values when one of its samples is first read. They become int64 there, which takes 8 bytes per sample that was read;
bits become bytes.

NOTE [no lock]
  Threads may open the same batch at the same time. Each fills in the same numbers, from one map: `setdefault` decides
  which. Objects enter `held` before their addresses enter `rows`, and a copy of a table is made of rows first. So
  whatever a table's rows point to is held by that table.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import FormatError, SchemaError, counted
from penstock.filesystem import MappedFile, PositionedFile
from penstock.identity import digest
from penstock.schema import Column, Ragged, Schema, offsets_of
from penstock.shards._arrays import sampled_identity
from penstock.shards._gather import Gathered, gather_ragged
from penstock.shards._ipc import Place, check_batches, find_places, read_ipc
from penstock.shards._open_shards import OPEN_FILES, pieces
from penstock.shards._storage import (
    COUNT,
    FILE,
    OFFSETS,
    READY,
    SIZE,
    STATE,
    VALUES,
    Table,
    column_slots,
    from_front,
    ranges,
)

Int64 = NDArray[np.int64]
_SAMPLED_BLOCKS = 64


class ArrowStorage(Gathered):
    """Random access to columns of Arrow files with the same schema, one after the other.

    Args:
        paths: The files.
        columns: The columns to open; None for all.

    Raises:
        SchemaError: a column cannot be opened, or the files have different schemas.
        FormatError: a file is damaged, or something that cannot be mapped.
    """

    def __init__(self, paths: Sequence[Path], columns: Sequence[str] | None = None) -> None:
        self.paths = tuple(path.resolve() for path in paths)
        """The files, as they are opened again."""
        self._files = [read_ipc(PositionedFile(path)) for path in self.paths]
        first = self._files[0].schema
        for path, file in zip(self.paths, self._files, strict=True):
            if not file.schema.equals(first):
                raise SchemaError(
                    f"{path}: its columns ({_names(file.schema)}) are not those of {self.paths[0].name} "
                    f"({_names(first)}). Open them one by one."
                )
        self._places = _choose(first, columns, self.paths[0])
        for path, file in zip(self.paths, self._files, strict=True):
            for place in self._places.values():
                check_batches(file, place, path)
        self.schema = Schema(tuple(place.column for place in self._places.values()))
        self.slots = column_slots(self.schema)
        self._firsts = offsets_of([len(file.num_rows) for file in self._files])
        """Number of the first batch of each file."""
        self._nodes = np.concatenate([file.nodes for file in self._files])
        self._buffers = np.concatenate([file.buffers for file in self._files])
        self.starts = offsets_of(np.concatenate([file.num_rows for file in self._files]))
        self.num_samples = int(self.starts[-1])
        self.value_starts: dict[str, Int64] = _ValueStarts(self)
        self.table = Table.empty(len(self.starts) - 1, len(self.schema))
        self.attributes: Mapping[str, Any] = _attributes(first, self.schema)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Identity of the data: schema, sizes, messages, and checksums of some of the contents."""
        parts = [repr(self.schema.to_json())]
        for number, file in enumerate(self._files):
            blocks = max(1, _SAMPLED_BLOCKS // len(self._files))
            sampled = sampled_identity(MappedFile(self.paths[number]), num_blocks=blocks)
            parts.append(f"{file.message_checksum:08x} {sampled}")
        return digest("\n".join(parts))

    @functools.cached_property
    def num_bytes(self) -> int:
        """Bytes of all columns that are open."""
        used = [each for place in self._places.values() for each in (place.values, place.offsets) if each is not None]
        return int(self._buffers[:, used, 1].sum())

    def whole_samples(self) -> NDArray[np.bool_] | None:
        """Whether each sample has all its values, without which it cannot be read; None if all of them do.

        Raises:
            FormatError: a value is missing inside a list.
        """
        is_whole = np.ones(self.num_samples, bool)
        for place in self._places.values():
            if self._nodes[:, place.inner, 1].any():
                raise FormatError(
                    f"{self.paths[0]}: lists of {place.column.name!r} have missing values, which no type can hold. "
                    "Leave the column out (columns=), or `penstock prepare` the data with a function that fills them."
                )
            for node, bits in place.rows:
                for batch in np.flatnonzero(self._nodes[:, node, 1]).tolist():
                    begin, end = self.starts[batch : batch + 2].tolist()
                    is_whole[begin:end] &= self._bits(batch, bits, end - begin)
        return None if is_whole.all() else is_whole

    def file_starts(self) -> Int64:
        """Number of the first sample of each file, and finally the number of samples."""
        return self.starts[self._firsts]

    def num_elements(self, column: Column) -> int:
        return int(self.value_starts[column.name][-1])

    def value(self, column: Column, index: int) -> NDArray[Any]:
        """One sample of a column, read-only: a view of the map."""
        index = int(from_front(np.array([index]), self.num_samples)[0])
        number = self._batch_of(index)
        self.prepare(column, index)
        values, offsets = self._arrays(column, number, self.table)
        sample = index - int(self.starts[number])
        found = values[sample] if offsets is None else values[offsets[sample] : offsets[sample + 1]]
        view = np.asarray(found).view()
        view.flags.writeable = False
        return view

    def lengths(self, column: Column, begin: int, end: int) -> Int64:
        parts = [np.empty(0, np.int64)]
        for number, first, last in ranges(self.starts, begin, end):
            parts.append(np.diff(self._checked_offsets(column, number)[first : last + 1]))
        return np.concatenate(parts)

    def read_ragged(self, column: Column, indices: Int64) -> Ragged:
        parts = [gather_ragged(self, column, each) for each in pieces(indices, len(self.paths))]
        return parts[0] if len(parts) == 1 else Ragged.concatenate(parts)

    def will_need(self, column: Column, begin: int, end: int) -> None:
        for number, _, _ in ranges(self.starts, begin, end):
            self._file_of(number, self.table).will_need(*self._extent(self._places[column.name].values, number))

    def dont_need(self, column: Column, begin: int, end: int) -> None:
        for number, _, _ in ranges(self.starts, begin, end):
            self._file_of(number, self.table).dont_need(*self._extent(self._places[column.name].values, number))

    def check_samples(self, column: Column, begin: int, end: int) -> None:
        """Check the offsets of samples `begin` to `end`; the values have no checksums."""
        for number, _, _ in ranges(self.starts, begin, end):
            self._open_batch(column, number)

    def prepare(self, column: Column, index: int, part: tuple[int, int] | None = None) -> None:
        self._open_batch(column, self._batch_of(index))

    def prepare_elements(self, column: Column, begin: int, end: int) -> None:
        starts = self.value_starts[column.name]
        first, last = np.searchsorted(starts, begin, side="right") - 1, np.searchsorted(starts, end, side="left")
        for number in range(int(first), int(last)):
            self._open_batch(column, number)

    def sample_length(self, column: Column, index: int) -> int:
        return int(self.lengths(column, index, index + 1)[0])

    def close_shards(self, numbers: set[int]) -> None:
        """Forget these files; they close when the last reader is done with them."""
        rows, held = self.table.rows.copy(), dict(self.table.held)
        for number in numbers:
            rows[self._firsts[number] : self._firsts[number + 1]] = 0
            held.pop(number, None)
        self.table = Table(rows, held)

    def _open_batch(self, column: Column, number: int) -> None:
        """Enter the addresses of a column of one batch into the table."""
        table, slot = self.table, self.slots[column.name]
        file = self._file_of(number, table)
        file.check_size()
        values, offsets = self._arrays(column, number, table)
        row = table.rows[number]
        row[FILE], row[SIZE] = file.descriptor, file.size
        row[slot + VALUES], row[slot + COUNT] = values.ctypes.data, len(values)
        row[slot + OFFSETS] = 0 if offsets is None else offsets.ctypes.data
        row[slot + STATE] = READY

    def _file_of(self, number: int, table: Table) -> _HeldFile:
        """The mapped file of a batch; a table keeps it open."""
        owner = int(np.searchsorted(self._firsts, number, side="right")) - 1
        file = table.held.get(owner)
        if file is None:
            OPEN_FILES.make_room()
            file = table.held.setdefault(owner, _HeldFile(self.paths[owner], self._files[owner].num_bytes))
            OPEN_FILES.opened(self, owner)
        assert isinstance(file, _HeldFile)
        return file

    def _arrays(self, column: Column, number: int, table: Table) -> tuple[NDArray[Any], Int64 | None]:
        """(values, offsets) of a batch: the values from the first sample's on."""
        arrays, key = self._file_of(number, table).arrays, (column.name, number)
        found = arrays.get(key)
        return found if found is not None else arrays.setdefault(key, self._make_arrays(column, number))

    def _make_arrays(self, column: Column, number: int) -> tuple[NDArray[Any], Int64 | None]:
        place, count = self._places[column.name], int(self.starts[number + 1] - self.starts[number])
        if place.offsets is None:
            return self._values(place, number, count), None
        offsets = self._checked_offsets(column, number)
        return self._values(place, number, int(offsets[-1]))[offsets[0] :], offsets - offsets[0]

    def _values(self, place: Place, number: int, count: int) -> NDArray[Any]:
        if place.are_bits:
            return self._bits(number, place.values, count)
        column, (begin, _) = place.column, self._extent(place.values, number)
        raw = self._file_of(number, self.table).bytes
        return np.ndarray((count, *column.shape), column.dtype, buffer=raw, offset=begin)

    def _bits(self, number: int, buffer: int, count: int) -> NDArray[np.bool_]:
        begin, end = self._extent(buffer, number)
        bits = np.unpackbits(self._file_of(number, self.table).bytes[begin:end], count=count, bitorder="little")
        return bits.view(bool)

    def batch_elements(self, column: Column, number: int) -> int:
        """Elements of a column in one batch."""
        stored = self._stored_offsets(column, number)
        first, last = int(stored[0]), int(stored[-1])
        if not 0 <= first <= last <= self._most_elements(column, number):
            raise self._damaged(column, number)
        return last - first

    def _checked_offsets(self, column: Column, number: int) -> Int64:
        """Where the samples of a batch begin, as int64.

        Raises:
            FormatError: they decrease, or exceed the values.
        """
        offsets = self._stored_offsets(column, number).astype(np.int64)
        is_inside = offsets[0] >= 0 and offsets[-1] <= self._most_elements(column, number)
        if not is_inside or (offsets[1:] < offsets[:-1]).any():
            raise self._damaged(column, number)
        return offsets

    def _stored_offsets(self, column: Column, number: int) -> NDArray[Any]:
        place, count = self._places[column.name], int(self.starts[number + 1] - self.starts[number])
        assert place.offsets is not None
        file = self._file_of(number, self.table)
        file.check_size()
        begin, end = self._extent(place.offsets, number)
        if count == 0 and begin == end:  # writers may leave out the one offset of no rows
            return np.zeros(1, np.int64)
        return np.ndarray(count + 1, f"<i{place.offset_bytes}", buffer=file.bytes, offset=begin)

    def _most_elements(self, column: Column, number: int) -> int:
        place = self._places[column.name]
        num_bytes = int(self._buffers[number, place.values, 1])
        return num_bytes * 8 if place.are_bits else num_bytes // max(1, column.item_bytes)

    def _damaged(self, column: Column, number: int) -> FormatError:
        return FormatError(
            f"{self._file_of(number, self.table).path}: the offsets of column {column.name!r} decrease or exceed its "
            f"values, in the batch of samples {self.starts[number]:,} to {self.starts[number + 1]:,}. The file is "
            "damaged; fetch or write it again."
        )

    def _extent(self, buffer: int, number: int) -> tuple[int, int]:
        """Bytes of a buffer of a batch in its file."""
        begin, size = self._buffers[number, buffer].tolist()
        return begin, begin + size

    def _batch_of(self, index: int) -> int:
        return int(np.searchsorted(self.starts, index, side="right")) - 1


class _HeldFile(MappedFile):
    """A file and the arrays made of its batches, which live as long as a table holds it."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        super().__init__(path)
        self.arrays: dict[tuple[str, int], tuple[NDArray[Any], Int64 | None]] = {}
        if self.size != num_bytes:
            self.size = num_bytes
            self.check_size()


class _ValueStarts(dict[str, Int64]):
    """Where the elements of each batch begin, found when first asked for: that takes two numbers of each batch."""

    def __init__(self, storage: ArrowStorage) -> None:
        super().__init__()
        self._storage = storage

    def __missing__(self, name: str) -> Int64:
        storage = self._storage
        column = storage.schema[name]
        if column.is_ragged:
            self[name] = offsets_of(
                [storage.batch_elements(column, number) for number in range(len(storage.starts) - 1)]
            )
        else:
            self[name] = storage.starts
        return self[name]


def _choose(schema: Any, columns: Sequence[str] | None, path: Path) -> dict[str, Place]:
    found, refused = find_places(schema)
    names = list(schema.names if columns is None else columns)
    for name in names:
        if name not in found and name not in refused:
            raise SchemaError(f"{path}: no column {name!r}; the columns are {_names(schema)}.")
    if wrong := [name for name in names if name in refused]:
        raise SchemaError(
            f"{path}: column {wrong[0]!r} cannot be opened as it is: {refused[wrong[0]]}. "
            f"Open the others, columns={[name for name in names if name in found]}, or `penstock prepare` the data."
        )
    if not names:
        raise SchemaError(f"{path}: no columns.")
    return {name: found[name] for name in names}


def _names(schema: Any) -> str:
    shown = ", ".join(map(repr, schema.names[:20]))
    return f"{shown} and {counted(len(schema.names) - 20, 'more column')}" if len(schema.names) > 20 else shown


def _attributes(schema: Any, chosen: Schema) -> dict[str, Any]:
    """The names of classes, which `datasets` keeps with the schema; they may be of one column only."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        labels = {name: part["names"] for name, part in features.items() if part.get("_type") == "ClassLabel"}
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return {}
    named = [names for name, names in labels.items() if name in chosen and isinstance(names, list)]
    return {"classes": named[0]} if len(named) == 1 else {}

"""One shard: its file, the tensors in it, and its row in the table of addresses.

    open_file -> Shard compares size and header with the manifest -> fill_row tells kernels where its columns are

No data is used before its blocks are checked (`_blocks`); once all blocks of a column are, one flag says so and
nothing is looked up again.
"""

import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from penstock.errors import CorruptionError, DatasetChanged, FormatError, IncompleteDataset, check_choice
from penstock.filesystem import FileReader, MappedFile, PositionedFile, is_network_filesystem, storage_errors
from penstock.schema import Column, Schema
from penstock.shards._blocks import ChecksumBlocks
from penstock.shards._layout import (
    BLOCK_BYTES,
    CHECKSUMS,
    checksum,
    match_header,
    offsets_name,
    plan_layout,
    read_header,
    values_name,
)
from penstock.shards._manifest import ShardEntry, read_manifest
from penstock.shards._storage import (
    COUNT,
    FILE,
    OFFSET_FLAGS,
    OFFSETS,
    OPEN,
    READY,
    SIZE,
    STATE,
    VALUE_FLAGS,
    VALUES,
    Table,
)

Io = Literal["auto", "map", "pread"]
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class Shard:
    """An open shard whose header matches the manifest.

    Raises:
        FormatError: the file is not the shard that the manifest describes.
        CorruptionError: its header does not match the checksum in the manifest.
    """

    def __init__(self, file: FileReader, entry: ShardEntry, schema: Schema) -> None:
        self.file = file
        self.entry = entry
        self.layout = plan_layout(schema, entry.num_samples, entry.num_values)
        self._where = str(file.path)
        self._check_size()
        file.populate(0, entry.header_bytes)
        header = file.read(0, entry.header_bytes).tobytes()
        self._check_header(header)
        table_checksum = read_header(header, self.layout, self._where)
        self.blocks = ChecksumBlocks(file, entry.header_bytes, self.layout, table_checksum)

    def values(self, column: Column, begin: int, end: int) -> NDArray[Any]:
        """Samples `begin` to `end` of a fixed column, or elements of a ragged one."""
        tensor = self.layout.tensors[values_name(column)]
        raw = self.blocks.read(tensor, begin * column.item_bytes, end * column.item_bytes)
        return raw.view(column.dtype).reshape(end - begin, *column.shape)

    def offsets(self, column: Column, begin: int, end: int) -> NDArray[np.int64]:
        """Where samples `begin` to `end` of a ragged column begin, and where the last one ends.

        Raises:
            FormatError: they decrease, or point outside the values.
        """
        tensor = self.layout.tensors[offsets_name(column)]
        offsets = self.blocks.read(tensor, begin * 8, (end + 1) * 8).view("<i8")
        count = self.entry.num_values[column.name]
        # Compared, not subtracted: differences of hostile offsets wrap around and look valid.
        if offsets[0] < 0 or offsets[-1] > count or (offsets[1:] < offsets[:-1]).any():
            raise FormatError(
                f"{self._where}: the offsets of column {column.name!r} decrease or exceed its {count:,} values, "
                f"between samples {begin:,} and {end:,} of the shard. The file was not written by Penstock, or was "
                "changed; prepare the dataset again."
            )
        return offsets

    def check_samples(self, column: Column, begin: int, end: int, part: tuple[int, int] | None = None) -> None:
        """Check the blocks that samples `begin` to `end` need, unless that was done before; or those of a part of them.

        Raises:
            CorruptionError: a block differs from its checksum; the message names it.
        """
        if column.is_ragged:
            self.check_offsets(column, begin, end)
            edges = self.offsets(column, begin, end)
            begin, end = int(edges[0]), int(edges[-1])
            if part is not None:
                begin, end = begin + part[0], min(end, begin + part[1])
            if begin == end:
                return
        self.check_values(column, begin, end)

    def check_values(self, column: Column, begin: int, end: int) -> None:
        """Check samples of a fixed column, or elements of a ragged one."""
        tensor = self.layout.tensors[values_name(column)]
        self.blocks.check_bytes(tensor, begin * column.item_bytes, end * column.item_bytes)

    def check_offsets(self, column: Column, begin: int, end: int) -> None:
        """Check only the offsets of samples `begin` to `end` of a ragged column."""
        self.blocks.check_bytes(self.layout.tensors[offsets_name(column)], begin * 8, (end + 1) * 8)

    def is_checked(self, column: Column) -> bool:
        """Whether every block of a column was checked."""
        names = [values_name(column), *([offsets_name(column)] if column.is_ragged else [])]
        return all(bool(self.blocks.flags(self.layout.tensors[name]).all()) for name in names)

    def will_need(self, column: Column, begin: int, end: int) -> None:
        """Tell the kernel that samples `begin` to `end` of the shard are needed soon."""
        self.file.will_need(*self._bytes_of(column, begin, end))

    def dont_need(self, column: Column, begin: int, end: int) -> None:
        """Tell the kernel that samples `begin` to `end` of the shard are no longer needed."""
        self.file.dont_need(*self._bytes_of(column, begin, end))

    def _bytes_of(self, column: Column, begin: int, end: int) -> tuple[int, int]:
        """Where the values of samples `begin` to `end` lie in the file."""
        tensor = self.layout.tensors[values_name(column)]
        if column.is_ragged:
            edges = self.offsets(column, begin, end)
            begin, end = int(edges[0]), int(edges[-1])
        start = self.entry.header_bytes + tensor.begin
        return start + begin * column.item_bytes, start + end * column.item_bytes

    def _check_size(self) -> None:
        expected = self.entry.header_bytes + self.layout.data_bytes
        if not self.entry.num_bytes == self.file.size == expected or not self.layout.is_addressable:
            raise FormatError(
                f"{self._where}: the file has {self.file.size:,} bytes and the manifest says {self.entry.num_bytes:,}; "
                f"its columns take {expected:,}. It is truncated or not this shard; "
                f"`penstock verify {self.file.path.parent}` lists what to restore."
            )

    def _check_header(self, header: bytes) -> None:
        length = int.from_bytes(header[:8], "little") + 8
        if checksum(header) != self.entry.header_checksum:
            raise CorruptionError(
                f"{self._where}: the header (bytes 0 to {len(header):,}) does not match its checksum. Restore the file."
            )
        if length != len(header):
            raise FormatError(f"{self._where}: the header claims {length:,} bytes, the manifest {len(header):,}.")


def read_lengths(path: Path, entry: ShardEntry, schema: Schema, column: str) -> NDArray[np.int64]:
    """Lengths of all samples of a ragged column, from the shard's offsets alone.

    Raises:
        FormatError: the file is not the shard that `entry` describes.
    """
    shard = Shard(PositionedFile(path), entry, schema)
    return np.diff(shard.offsets(schema[column], 0, entry.num_samples))


def read_offsets(
    path: str, entry: ShardEntry, schema: Schema, column: Column, *, is_trusted: bool
) -> NDArray[np.int64] | None:
    """All offsets of a ragged column, without opening the shard for good; if `is_trusted`, no checksum is compared.

    Lengths are asked of all shards at once, often of more than may stay open. They need three reads of a small shard,
    30 us; opening it takes 200. Nothing is judged here: if anything is not as Penstock writes it, or too long to be
    worth a copy, the answer is None, and opening the shard says what is wrong.
    """
    layout = plan_layout(schema, entry.num_samples, entry.num_values)
    tensor, table = layout.tensors[offsets_name(column)], layout.tensors[CHECKSUMS]
    num_bytes = entry.header_bytes + layout.data_bytes
    is_small = tensor.num_bytes <= BLOCK_BYTES and table.num_bytes <= BLOCK_BYTES
    if not is_small or entry.num_bytes != num_bytes or not layout.is_addressable:
        return None
    spans = (0, entry.header_bytes), *((entry.header_bytes + each.begin, each.num_bytes) for each in (tensor, table))
    parts = _read_spans(path, num_bytes, spans)
    if parts is None:
        return None
    header, raw, sums = parts
    if checksum(header) != entry.header_checksum or len(raw) != tensor.num_bytes:
        return None
    table_checksum = match_header(header, layout)
    if table_checksum is None:
        return None
    if not is_trusted:
        expected = sums[4 * tensor.first_block : 4 * tensor.first_block + 4]
        if checksum(sums) != table_checksum or checksum(raw) != int.from_bytes(expected, "little"):
            return None
    offsets = np.frombuffer(raw, "<i8")
    is_valid = offsets[0] >= 0 and offsets[-1] <= entry.num_values[column.name]
    return offsets if is_valid and bool((offsets[1:] >= offsets[:-1]).all()) else None


def _read_spans(path: str, num_bytes: int, spans: tuple[tuple[int, int], ...]) -> list[bytes] | None:
    """The bytes at each (begin, length) of a regular file of this size."""
    try:
        descriptor = os.open(path, _READ_FLAGS)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size != num_bytes:
            return None
        return [os.pread(descriptor, length, begin) for begin, length in spans]
    except OSError:
        return None
    finally:
        os.close(descriptor)


def write_hollow(
    path: Path,
    entry: ShardEntry,
    schema: Schema,
    read: Callable[[int, int], Any] | None,
    *,
    within: int | None = None,
) -> None:
    """Write a file as large as a shard, with its header, offsets and checksums, and a hole in place of its values.

    It takes hardly any room, lengths can be read from it, and values cannot: their checksums do not match. `read` gives
    bytes of the shard; without it, everything is a hole. With `within`, the file is made in that open folder.
    """
    layout, kept = plan_layout(schema, entry.num_samples, entry.num_values), {CHECKSUMS}
    kept |= {offsets_name(column) for column in schema.columns if column.is_ragged}
    begin = entry.header_bytes
    spans = [(begin + each.begin, begin + each.end) for name, each in layout.tensors.items() if name in kept]
    spans = [(0, begin), *spans] if read is not None else []
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with storage_errors(path, doing="created"):
        descriptor = os.open(path if within is None else path.name, flags, 0o666, dir_fd=within)
        with os.fdopen(descriptor, "wb") as file:
            file.truncate(entry.num_bytes)
            for begin, end in spans:
                assert read is not None
                file.seek(begin)
                file.write(read(begin, end))
            file.flush()
            os.fsync(descriptor)


def resolve_io(io: Io, path: Path) -> Literal["map", "pread"]:
    """How to read files at `path`."""
    check_choice("io", io, get_args(Io))
    if io == "auto":
        return "pread" if is_network_filesystem(path) else "map"
    return io


def open_file(folder: Path, name: str, *, io: Literal["map", "pread"], fingerprint: str) -> MappedFile | PositionedFile:
    """Open shard `name` of the dataset that has `fingerprint`.

    Raises:
        DatasetChanged: the dataset was overwritten, moved or removed.
        FormatError: the shard is missing.
    """
    kind: type[MappedFile | PositionedFile] = MappedFile if io == "map" else PositionedFile
    try:
        return kind(folder / name)
    except (FileNotFoundError, NotADirectoryError):
        missing = _missing(folder, name, fingerprint)
    try:  # the same data may just have been written again, under the same name
        if isinstance(missing, DatasetChanged):
            raise missing
        return kind(folder / name)
    except FileNotFoundError:
        raise missing from None
    finally:
        del missing  # else it holds its traceback, and so what the callers hold, other shards say, until a collection


def changed(folder: Path, found: str, expected: str) -> DatasetChanged:
    """The error for a dataset that is not the one that was opened."""
    return DatasetChanged(
        f"{folder}: the dataset has the fingerprint {found}, not {expected}: "
        "it was rewritten after it was opened. Open it again."
    )


def _missing(folder: Path, name: str, fingerprint: str) -> Exception:
    try:
        now = read_manifest(folder).fingerprint
    except IncompleteDataset as error:
        return DatasetChanged(f"{error} It was moved or removed after it was opened; open it at its new path.")
    if now != fingerprint:
        return changed(folder, now, fingerprint)
    return FormatError(f"{folder / name}: the shard is missing. Restore it, or prepare the dataset again.")


def fill_row(table: Table, number: int, shard: Shard, slots: Mapping[str, int], *, is_trusted: bool) -> None:
    """Write where the columns of shard `number` lie; if `is_trusted`, its blocks are never checked."""
    assert isinstance(shard.file, MappedFile)
    row, columns = table.rows[number], shard.layout.schema.stored.columns
    row[FILE], row[SIZE] = shard.file.descriptor, shard.file.size
    data = shard.file.address + shard.entry.header_bytes
    for column in columns:
        slot = slots[column.name]
        values = shard.layout.tensors[values_name(column)]
        row[slot + VALUES] = data + values.begin
        row[slot + VALUE_FLAGS] = shard.blocks.flags(values).ctypes.data
        if column.is_ragged:
            offsets = shard.layout.tensors[offsets_name(column)]
            row[slot + OFFSETS] = data + offsets.begin
            row[slot + OFFSET_FLAGS] = shard.blocks.flags(offsets).ctypes.data
            row[slot + COUNT] = shard.entry.num_values[column.name]
    table.held[number] = shard
    for column in columns:  # last, because readers look only at the state
        row[slots[column.name] + STATE] = READY if is_trusted or shard.is_checked(column) else OPEN

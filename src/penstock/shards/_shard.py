"""One open shard: its tensors, as the manifest says they lie in the file.

When all blocks of a column were checked (`_blocks`), one flag says so and nothing is looked at again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import CorruptionError, FormatError
from penstock.filesystem import FileReader
from penstock.schema import Column, Schema
from penstock.shards._blocks import Blocks
from penstock.shards._checksums import checksum
from penstock.shards._layout import offsets_name, plan_layout, read_header, values_name
from penstock.shards._manifest import ShardEntry


class Shard:
    """An open shard whose header was compared with the manifest.

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
        self.blocks = Blocks(file, entry.header_bytes, self.layout, table_checksum)

    def values(self, column: Column, begin: int, end: int) -> NDArray[Any]:
        """Samples `begin` to `end` of a fixed column, or elements of a ragged one."""
        tensor = self.layout.tensors[values_name(column)]
        raw = self.blocks.read(tensor, begin * column.item_bytes, end * column.item_bytes)
        return raw.view(column.dtype).reshape(end - begin, *column.shape)

    def offsets(self, column: Column, begin: int, end: int) -> NDArray[np.int64]:
        """Where samples `begin` to `end` of a ragged column begin, and where the last one ends.

        Raises:
            FormatError: they fall, or leave the values.
        """
        tensor = self.layout.tensors[offsets_name(column)]
        offsets = self.blocks.read(tensor, begin * 8, (end + 1) * 8).view("<i8")
        count = self.entry.num_values[column.name]
        # Compared, not subtracted: differences of hostile offsets wrap around and look sound.
        if offsets[0] < 0 or offsets[-1] > count or (offsets[1:] < offsets[:-1]).any():
            raise self.bad_offsets(column, begin, end)
        return offsets

    def bad_offsets(self, column: Column, begin: int, end: int) -> FormatError:
        """The error for offsets that no sound shard has."""
        return FormatError(
            f"{self._where}: the offsets of column {column.name!r} fall or leave its "
            f"{self.entry.num_values[column.name]:,} values, between samples {begin:,} and {end:,} of the shard. "
            "The file was not written by Penstock, or was changed; prepare the dataset again."
        )

    def check_samples(self, column: Column, begin: int, end: int) -> None:
        """Check what samples `begin` to `end` need, as far as it was not yet.

        Raises:
            CorruptionError: a block differs from its checksum; the message names it.
        """
        if column.is_ragged:
            self.check_offsets(column, begin, end)
            edges = self.offsets(column, begin, end)
            begin, end = int(edges[0]), int(edges[-1])
        self.check_values(column, begin, end)

    def check_values(self, column: Column, begin: int, end: int) -> None:
        """Check samples of a fixed column, or elements of a ragged one."""
        tensor = self.layout.tensors[values_name(column)]
        self.blocks.check_bytes(tensor, begin * column.item_bytes, end * column.item_bytes)

    def check_offsets(self, column: Column, begin: int, end: int) -> None:
        """Check only where samples `begin` to `end` of a ragged column lie."""
        self.blocks.check_bytes(self.layout.tensors[offsets_name(column)], begin * 8, (end + 1) * 8)

    def is_checked(self, column: Column) -> bool:
        """Whether every block of a column was checked."""
        names = [values_name(column), *([offsets_name(column)] if column.is_ragged else [])]
        return all(bool(self.blocks.flags(self.layout.tensors[name]).all()) for name in names)

    def announce_samples(self, column: Column, begin: int, end: int) -> None:
        """Tell the kernel that samples `begin` to `end` of the shard are needed soon."""
        self.file.announce(*self._bytes_of(column, begin, end))

    def release_samples(self, column: Column, begin: int, end: int) -> None:
        """Tell the kernel that samples `begin` to `end` of the shard are done with."""
        self.file.release(*self._bytes_of(column, begin, end))

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
        is_sound = all(tensor.is_addressable for tensor in self.layout.tensors.values())
        if self.entry.num_bytes != expected or self.file.size != expected or not is_sound:
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
            raise FormatError(f"{self._where}: the header says it has {length:,} bytes, the manifest {len(header):,}.")

"""A mapped shard's row in the table of addresses."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.filesystem import MappedFile
from penstock.shards._layout import offsets_name, values_name
from penstock.shards._shard import Shard
from penstock.shards._table import (
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


def fill_row(table: Table, number: int, shard: Shard, slots: Mapping[str, int], *, is_trusted: bool) -> None:
    """Write where the columns of shard `number` lie; `is_trusted` says that no block of it is ever checked."""
    assert isinstance(shard.file, MappedFile)
    row, columns = table.rows[number], shard.layout.schema.columns
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
    for column in columns:  # last: a reader acts on the state alone
        row[slots[column.name] + STATE] = READY if is_trusted or shard.is_checked(column) else OPEN

"""The shards of a folder that are open, and the table by which compiled loops find them.

The table is shared by all threads and only ever gains shards. To close one, a new table without it
takes the place of the old; readers that still use the old one keep it, and with it the maps it points
into, alive. So no read takes a lock, and no map goes away under a read.

After a fork the child starts with nothing open: maps would survive, locks held by other threads of
the parent would not be released.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from pathlib import Path
from typing import Literal

from penstock.errors import PenstockError
from penstock.filesystem import MappedFile
from penstock.schema import Column
from penstock.shards._blocks import Checks
from penstock.shards._manifest import Manifest
from penstock.shards._open_files import OPEN_FILES
from penstock.shards._opening import open_file
from penstock.shards._shard import Shard
from penstock.shards._shard_row import fill_row
from penstock.shards._table import READY, STATE, Table, column_slots

_all: weakref.WeakSet[OpenShards] = weakref.WeakSet()


class OpenShards:
    """Opens a shard when it is first wanted; `is_trusted` says that no block of any is ever checked."""

    def __init__(self, path: Path, manifest: Manifest, *, io: Literal["map", "pread"], is_trusted: bool) -> None:
        self.slots = column_slots(manifest.schema)
        self._path = path
        self._manifest = manifest
        self._fingerprint = manifest.fingerprint
        self._io = io
        self._is_trusted = is_trusted
        self._checks: dict[int, Checks] = {}
        self.reset()
        _all.add(self)

    def reset(self) -> None:
        """Close every shard; the next read opens what it needs."""
        self._lock = threading.Lock()
        self._shards: dict[int, Shard] = {}
        self.table = Table.empty(len(self._manifest.shards), len(self._manifest.schema))

    def open_shard(self, number: int) -> Shard:
        """Shard `number`, opened when it is not.

        Raises:
            DatasetChanged: the dataset was overwritten, moved or removed since it was opened.
            FormatError: the shard is missing or is not what the manifest says.
        """
        shard = self._shards.get(number)
        if shard is None:
            OPEN_FILES.make_room()
            with self._lock:
                shard = self._shards.get(number)
                if shard is None:
                    shard = self._open(number)
                    self._shards[number] = shard
                    OPEN_FILES.opened(self, number)
                    if isinstance(shard.file, MappedFile):
                        fill_row(self.table, number, shard, self.slots, is_trusted=self._is_trusted)
        return shard

    def close_shards(self, numbers: set[int]) -> None:
        """Forget these shards; their files close when the last reader is done with them."""
        with self._lock:
            rows = self.table.rows.copy()
            rows[list(numbers)] = 0
            held = {number: shard for number, shard in self.table.held.items() if number not in numbers}
            self._shards = {number: shard for number, shard in self._shards.items() if number not in numbers}
            self.table = Table(rows, held)

    def note_checked(self, column: Column, number: int, shard: Shard) -> None:
        """Let readers know when the last window of a column was checked, and look ahead into the next shard."""
        if self._io == "map" and shard.is_checked(column):
            with self._lock:
                if self._shards.get(number) is shard:
                    self.table.rows[number, self.slots[column.name] + STATE] = READY
        self._go_on(number, shard.blocks.take_through())

    def _open(self, number: int) -> Shard:
        entry = self._manifest.shards[number]
        file = open_file(self._path, entry.name, io=self._io, fingerprint=self._fingerprint)
        shard = Shard(file, entry, self._manifest.schema)
        checks = shard.blocks.checks
        known = self._checks.setdefault(number, checks)
        if known.identity == checks.identity:
            shard.blocks.checks = known
        else:
            self._checks[number] = checks
        return shard

    def _go_on(self, number: int, through: dict[str, int]) -> None:
        """Look ahead from the end of a shard into the next one."""
        if through and number + 1 < len(self._manifest.shards):
            with contextlib.suppress(PenstockError, OSError):  # whoever reads there will be told
                shard = self.open_shard(number + 1)
                for name, length in through.items():
                    shard.blocks.look_ahead(shard.layout.tensors[name], 0, length)


def _reset_after_fork() -> None:
    OPEN_FILES.reset()
    for shards in list(_all):
        shards.reset()


os.register_at_fork(after_in_child=_reset_after_fork)

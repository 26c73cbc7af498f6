"""Row counts for packing, stored with the dataset so that a packed plan opens at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import SchemaError
from penstock.packing import PACKING_VERSION, PackingSettings, build_pack_index, index_name
from penstock.schema import Schema, offsets_of
from penstock.shards import Manifest, Workspace, read_lengths

PACKED_COLUMN = "tokens"


def check_packable(schema: Schema, pack: Sequence[int]) -> None:
    """Refuse row lengths for data that has no documents of tokens, before any work is done.

    Raises:
        SchemaError: there is no ragged column `tokens`.
    """
    if pack and not (PACKED_COLUMN in schema and schema[PACKED_COLUMN].is_ragged):
        raise SchemaError(f"pack={list(pack)} counts rows of a ragged column 'tokens'; the columns are {schema}.")
    for length in pack:
        PackingSettings(length=length)


def pack_attributes(workspace: Workspace, manifest: Manifest, pack: Sequence[int]) -> dict[str, Any]:
    """The manifest's section on packing; nothing when no row length was asked for."""
    if not pack:
        return {}
    lengths = _Lengths(workspace, manifest)
    indexes: dict[str, Any] = {}
    for length in pack:
        settings = PackingSettings(length=length)
        index = build_pack_index(lengths.read, manifest.num_samples, settings)
        indexes[index_name(PACKED_COLUMN, settings)] = index.to_json()
    return {"packing": {"version": PACKING_VERSION, "samples": manifest.num_samples, "indexes": indexes}}


class _Lengths:
    """Lengths of all documents, read from the shards one at a time."""

    def __init__(self, workspace: Workspace, manifest: Manifest) -> None:
        self._workspace = workspace
        self._manifest = manifest
        counts = [shard.num_samples for shard in manifest.shards]
        self._starts = offsets_of(counts)
        self._last: tuple[int, NDArray[np.int64]] | None = None

    def read(self, begin: int, end: int) -> NDArray[np.int64]:
        """Lengths of documents `begin` to `end`."""
        parts = [np.empty(0, np.int64)]
        number = int(np.searchsorted(self._starts, begin, side="right")) - 1
        while begin < end:
            first, last = int(self._starts[number]), min(end, int(self._starts[number + 1]))
            parts.append(self._shard(number)[begin - first : last - first])
            begin, number = last, number + 1
        return np.concatenate(parts)

    def _shard(self, number: int) -> NDArray[np.int64]:
        if self._last is None or self._last[0] != number:
            entry = self._manifest.shards[number]
            path = self._workspace.shard_path(entry.name)
            self._last = (number, read_lengths(path, entry, self._manifest.schema, PACKED_COLUMN))
        return self._last[1]

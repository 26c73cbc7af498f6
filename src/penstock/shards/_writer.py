"""Write a dataset: samples in, shards out, all or nothing.

Memory is bounded by the buffer of one shard. Shards are cut only by size, sample by sample, so the
same samples give the same files however they were handed in.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self, get_args

from penstock.errors import SchemaError, check_choice
from penstock.filesystem import local_path
from penstock.schema import Schema
from penstock.shards._convert import convert_sample
from penstock.shards._manifest import FileEntry, Manifest, ShardEntry, copy_attributes
from penstock.shards._shard_writer import ShardWriter, check_names, convert_columns
from penstock.shards._workspace import Mode, Workspace

DEFAULT_SHARD_BYTES = 256 << 20


class DatasetWriter:
    """Write samples into a folder of shards; the dataset appears when the block ends without an error.

    An exception leaves whatever was there before.

    Args:
        path: Folder of the dataset; created if missing.
        columns: `{name: type}`, as in `{"tokens": "uint16[*]", "label": "int64", "jpeg": "bytes"}`.
        shard_bytes: A shard is closed before it grows past this. It is also the memory the writer takes.
        mode: "create" refuses an existing dataset, "append" adds to it, "overwrite" replaces it.
        attributes: JSON kept in the manifest: where the data comes from, its licence, its tokenizer.

    Raises:
        DatasetExists: `mode="create"` on a dataset, or the folder holds other files.
        WriterBusy: another process is writing here.
        StorageError: the disk is full or failing; the previous dataset is intact.

    >>> import tempfile, penstock
    >>> folder = tempfile.mkdtemp()
    >>> with DatasetWriter(folder, {"tokens": "uint16[*]", "label": "int64"}) as writer:
    ...     writer.write({"tokens": [1, 2, 3], "label": 7})
    ...     writer.write_batch({"tokens": [[4], [5, 6]], "label": [8, 9]})
    >>> len(penstock.open(folder))
    3
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        columns: Mapping[str, str],
        *,
        shard_bytes: int = DEFAULT_SHARD_BYTES,
        mode: Mode = "create",
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        check_choice("mode", mode, get_args(Mode))
        if shard_bytes < 1:
            raise ValueError(f"shard_bytes={shard_bytes}; a shard has at least one byte.")
        self.schema = Schema.parse(columns)
        """The columns that every sample must have."""
        self._stored = self.schema
        self._attributes = copy_attributes(attributes or {})
        self._workspace: Workspace | None = Workspace(local_path(path, "a dataset").absolute(), mode)
        if mode == "append":
            self._stored = self._schema_to_continue(self._workspace)
        self._writer = ShardWriter(self._stored, shard_bytes, self._workspace.add_file)
        self._previous: tuple[ShardEntry, ...] = ()
        self._provenance: FileEntry | None = None
        self._is_torn = False  # a write failed halfway, so columns may hold different samples
        if mode == "append":
            self._continue(self._workspace)

    def write(self, sample: Mapping[str, Any]) -> None:
        """Add one sample: a value for every column.

        Raises:
            SchemaError: a column is missing, unknown, or the value does not fit it.
        """
        self._check_usable()
        check_names(self.schema, sample)
        converted = {column.name: convert_sample(column, sample[column.name]) for column in self.schema.columns}
        self._is_torn = True
        self._writer.append_sample(converted)
        self._is_torn = False

    def write_batch(self, columns: Mapping[str, Any]) -> None:
        """Add many samples: for every column an array, a `Ragged`, or a list with one value per sample.

        Raises:
            SchemaError: as `write`, or the columns differ in length.
        """
        self._check_usable()
        batch = convert_columns(self.schema, columns)
        self._is_torn = True
        self._writer.append_converted(batch)
        self._is_torn = False

    def close(self) -> None:
        """Make everything written so far the dataset. Called by the end of the `with` block."""
        if self._workspace is None:
            return
        try:
            self._check_usable()
            shards = (*self._previous, *self._writer.finish())
            self._workspace.commit(Manifest(self._stored, shards, self._attributes, self._provenance))
        finally:
            self.abort()

    def abort(self) -> None:
        """Drop what was not committed; the previous dataset, if any, stays."""
        workspace, self._workspace = self._workspace, None
        if workspace is not None:
            workspace.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _schema_to_continue(self, workspace: Workspace) -> Schema:
        assert workspace.previous is not None
        stored = workspace.previous.schema
        if stored.shown != self.schema:
            self.abort()
            raise SchemaError(f"The dataset has the columns {stored.shown}; cannot append {self.schema}.")
        return stored

    def _continue(self, workspace: Workspace) -> None:
        previous = workspace.previous
        assert previous is not None
        self._previous = previous.shards
        self._writer.restart(workspace.add_file, first_number=len(previous.shards))
        self._attributes = {**previous.attributes, **self._attributes}
        self._provenance = previous.provenance

    def _check_usable(self) -> None:
        if self._workspace is None:
            raise ValueError("The writer is closed.")
        if not self._workspace.is_open:
            raise ValueError("A writer belongs to the process that made it; this one is a forked copy.")
        if self._is_torn:
            raise ValueError(
                "An earlier write failed halfway, so this writer cannot continue. Write the dataset again."
            )

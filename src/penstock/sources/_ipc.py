"""Arrow IPC: files with a footer, and streams without one, which is what Hugging Face datasets write.

A local file is mapped, so batches outside the split cost nothing to step over, not even in a stream. One that
is elsewhere is read from start to end, as one split. Every batch is validated in full before it is given
(see `_arrow`): a damaged one can crash the process (2 of 200 bit flips, reliability notes).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.filesystem import is_network_filesystem
from penstock.sources._arrow import arrow, check_columns, cut_batch, named_damage, records_of_batch
from penstock.sources._cutting import runs
from penstock.sources._files import open_anywhere
from penstock.sources._model import Records, SourceFile, Split
from penstock.sources._options import SourceOptions
from penstock.sources._remote import is_remote

_MAGIC = b"ARROW1"


def split_ipc(file: SourceFile, options: SourceOptions, target_bytes: int) -> list[Split]:
    """Runs of record batches of about `target_bytes`."""
    if is_remote(file.path):
        return [Split("arrow", file.path, 0, -1, max(file.num_bytes, 0))]
    with _open(file.path, options) as batches:
        sizes = [batch.nbytes for batch in batches]
    return [Split("arrow", file.path, begin, end, sum(sizes[begin:end])) for begin, end in runs(sizes, target_bytes)]


def read_ipc(split: Split, options: SourceOptions) -> Iterator[Records]:
    """Records of a run of batches; an `end` of -1 is the end of the file."""
    row = 0
    with _open(split.path, options) as batches:
        for number, batch in enumerate(batches):
            if 0 <= split.end <= number:
                return
            if number >= split.begin:
                for piece in cut_batch(batch, options.batch_bytes):
                    yield records_of_batch(piece, row, split.path)
                    row += piece.num_rows


@contextlib.contextmanager
def _open(path: str, options: SourceOptions) -> Iterator[Iterator[Any]]:
    """The batches of a file with the wanted columns, checked as far as their buffers go."""
    with open_anywhere(path, options) as file, named_damage(path, "Arrow"), contextlib.closing(_source(file)) as source:
        yield _batches(source, path, options)


def _source(file: Any) -> Any:
    pa = arrow()
    is_local = not is_remote(file.path)
    if is_local and file.size and not is_network_filesystem(Path(file.path)):
        return pa.memory_map(file.path)
    return pa.OSFile(file.path) if is_local else pa.PythonFile(file, "r")


def _batches(source: Any, path: str, options: SourceOptions) -> Iterator[Any]:
    ipc = arrow("ipc")
    is_file = source.read(len(_MAGIC)) == _MAGIC
    source.seek(0)
    reader = ipc.open_file(source) if is_file else ipc.open_stream(source)
    check_columns(reader.schema.names, path, options.columns)
    batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
    for batch in batches:
        batch.validate()
        yield batch if options.columns is None else batch.select(list(options.columns))

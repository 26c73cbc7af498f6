"""Text: a document per file, per line, or between separators.

Lines and separated documents come from blocks of the file by one vectorised split. A document's bytes are
kept as they are, but for a byte-order mark at the start of the file and the "\\r" of a line that ends with
"\\r\\n". Empty lines are empty documents; what follows the last separator is one unless it is empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.sources._arrow import arrow, as_text, records_of_batch
from penstock.sources._blocks import Block
from penstock.sources._marks import without_mark
from penstock.sources._model import Records, RowError, Split
from penstock.sources._options import SourceOptions
from penstock.sources._whole_files import FileBatch, batches_of_files


def separator_of(options: SourceOptions) -> bytes:
    """What ends a document within a file."""
    return b"\n" if options.separator is None else options.separator.encode(options.encoding)


def read_text_blocks(blocks: Iterator[Block], path: str, options: SourceOptions) -> Iterator[Records]:
    """Documents of blocks that end with a separator, but for the last."""
    row = 0
    for block in blocks:
        records = _read_block(block, row, path, options)
        row += records.num_rows + len(records.errors)
        if records.num_rows or records.errors:
            yield records


def read_text_files(split: Split, options: SourceOptions) -> Iterator[Records]:
    """One document per file of a group."""
    for batch in batches_of_files(split, options, without_mark):
        yield _records_of_files(batch, split, options)


def _read_block(block: Block, row: int, path: str, options: SourceOptions) -> Records:
    if block.dropped_bytes:
        message = f"the document at byte {block.offset:,} has {block.dropped_bytes:,} bytes, over max_record_bytes."
        return Records({}, row, 0, (RowError(path, row, "too_long", message),), None, block.dropped_bytes)
    data = without_mark(block.data, path) if block.offset == 0 else block.data
    texts = as_text(_split(data, separator_of(options)), options.encoding)
    return records_of_batch(_with_paths(texts, [path] * len(texts)), row, path, num_bytes=len(block.data))


def _split(data: bytes, separator: bytes) -> Any:
    """Documents of a block as a binary array."""
    pa = arrow()
    if separator == b"\n" and b"\r" in data:
        data = data.replace(b"\r\n", b"\n")
    if separator in data:  # then the block ends with one; a rest that has none is the end of the file
        data = data[: -len(separator)]
    elif not data:
        return pa.array([], pa.large_binary())
    pieces = arrow("compute").split_pattern(pa.array([data], pa.large_binary()), separator)
    return pieces.values


def _records_of_files(batch: FileBatch, split: Split, options: SourceOptions) -> Records:
    paths = [split.paths[row] for row in batch.rows]
    texts = as_text(arrow().array(batch.contents, arrow().large_binary()), options.encoding)
    table = _with_paths(texts, paths)
    records = records_of_batch(
        table, batch.first_row, split.path, num_bytes=batch.num_bytes, errors=tuple(batch.errors)
    )
    errors = tuple(RowError(split.paths[e.row], e.row, e.reason, e.message) for e in records.errors)
    return Records(records.columns, records.first_row, records.num_rows, errors, records.rows, records.num_bytes)


def _with_paths(texts: Any, paths: list[str]) -> Any:
    return arrow().RecordBatch.from_arrays([texts, arrow().array(paths, arrow().string())], names=["text", "path"])

"""One split in, records out: which reader reads which format."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from penstock.sources._blocks import Block, range_blocks, stream_blocks
from penstock.sources._csv import has_line_records, read_csv_blocks, read_csv_stream
from penstock.sources._csv_header import read_header
from penstock.sources._files import open_anywhere, open_stream
from penstock.sources._formats import compression_of
from penstock.sources._images import read_images
from penstock.sources._ipc import read_ipc
from penstock.sources._jsonl import read_jsonl
from penstock.sources._model import Records, Split
from penstock.sources._objects import peek_object, read_object
from penstock.sources._options import SourceOptions
from penstock.sources._parquet import read_parquet
from penstock.sources._text import read_text_blocks, read_text_files, separator_of
from penstock.sources._webdataset import read_webdataset


def read_split(split: Split, options: SourceOptions) -> Iterator[Records]:
    """Records of one split, in order; the same every time.

    Raises:
        FormatError: the file is truncated or damaged.
        SchemaError: it lacks a column of `options.columns`.
        StorageError: it is gone, or a remote store did not answer `max_attempts` times.
    """
    return _READERS[split.format](split, options)


def peek_split(split: Split, options: SourceOptions) -> Iterator[Records]:
    """As `read_split`, for a look at the first records: the split can be read afterwards, whatever it is of."""
    return peek_object(split, options) if split.format == "object" else read_split(split, options)


def _read_jsonl(split: Split, options: SourceOptions) -> Iterator[Records]:
    return read_jsonl(_blocks(split, options, b"\n"), split.path, options.columns)


def _read_csv(split: Split, options: SourceOptions) -> Iterator[Records]:
    if not has_line_records(options):
        yield from read_csv_stream(lambda: open_stream(split.path, options), split.path, options)
        return
    with open_stream(split.path, options) as stream:
        header = read_header(stream, split.path, options)
    blocks = _blocks(split, options, b"\n", skip=header.num_bytes)
    yield from read_csv_blocks(blocks, header, split.path, options)


def _read_text(split: Split, options: SourceOptions) -> Iterator[Records]:
    if options.text_unit == "file":
        return read_text_files(split, options)
    return read_text_blocks(_blocks(split, options, separator_of(options)), split.path, options)


def _read_webdataset(split: Split, options: SourceOptions) -> Iterator[Records]:
    with open_stream(split.path, options) as stream:
        yield from read_webdataset(stream, split.path, options)


def _blocks(split: Split, options: SourceOptions, separator: bytes, skip: int = 0) -> Iterator[Block]:
    """Whole records of a split, without the first `skip` bytes of the file."""
    sizes = {"block_bytes": options.batch_bytes, "max_record_bytes": options.max_record_bytes}
    if compression_of(split.path) is not None or split.end < 0:
        with open_stream(split.path, options) as stream:
            stream.read(skip)
            yield from stream_blocks(stream, separator, offset=skip, **sizes)
    else:
        with open_anywhere(split.path, options) as file:
            yield from range_blocks(file, max(split.begin, skip), split.end, separator, **sizes)


_READERS: dict[str, Callable[[Split, SourceOptions], Iterator[Records]]] = {
    "arrow": read_ipc,
    "csv": _read_csv,
    "images": read_images,
    "jsonl": _read_jsonl,
    "object": read_object,
    "parquet": read_parquet,
    "text": _read_text,
    "webdataset": _read_webdataset,
}

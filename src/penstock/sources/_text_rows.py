"""Text as Python strings: lines or separated documents of a block, or a whole file.

The same documents as `_text` gives, without the path: a block is decoded at once and cut by `str.split`, and
only one that does not decode is looked at document by document.
"""

from __future__ import annotations

from typing import Any, TypeVar

from penstock.errors import FormatError
from penstock.sources._blocks import Block, ByteStream, read_exactly
from penstock.sources._marks import without_mark
from penstock.sources._model import RowError
from penstock.sources._options import SourceOptions
from penstock.sources._text import separator_of

Values = list[dict[str, Any]]
_Piece = TypeVar("_Piece", str, bytes)


def read_documents(block: Block, path: str, options: SourceOptions) -> tuple[Values, tuple[RowError, ...]]:
    """Documents of a block of whole ones; the last of a file may lack its separator."""
    data = without_mark(block.data, path) if block.offset == 0 else block.data
    separator = separator_of(options)
    if separator == b"\n" and b"\r" in data:
        data = data.replace(b"\r\n", b"\n")
    try:
        texts = data.decode(options.encoding).split(separator.decode(options.encoding))
    except UnicodeDecodeError:
        return _decode_each(_without_end(data.split(separator)), block.offset, path, options)
    return [{"text": text} for text in _without_end(texts)], ()


def read_document(stream: ByteStream, path: str, options: SourceOptions) -> tuple[Values, tuple[RowError, ...]]:
    """The one document of a file."""
    data = read_exactly(stream, options.max_record_bytes + 1)
    if len(data) > options.max_record_bytes:
        raise FormatError(f"{path}: the file has more than max_record_bytes={options.max_record_bytes:,} bytes.")
    return _decode_each([without_mark(data, path)], 0, path, options)


def _without_end(pieces: list[_Piece]) -> list[_Piece]:
    """What stands before separators, and behind the last one if anything does."""
    return pieces if pieces[-1] else pieces[:-1]


def _decode_each(
    pieces: list[bytes], offset: int, path: str, options: SourceOptions
) -> tuple[Values, tuple[RowError, ...]]:
    values, errors = [], []
    for row, piece in enumerate(pieces):
        try:
            values.append({"text": piece.decode(options.encoding)})
        except UnicodeDecodeError as error:
            message = f"document {row}, counted from byte {offset:,}, is not {options.encoding}: {error.reason}."
            errors.append(RowError(path, row, "invalid_utf8", message))
    return values, tuple(errors)

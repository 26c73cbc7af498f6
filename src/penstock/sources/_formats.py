"""What a file name says about format and compression.

Only names are examined here, so that listing a million files opens none of them.
"""

from __future__ import annotations

import posixpath
from typing import cast

from penstock.sources._options import Format, SourceOptions

_SUFFIXES: dict[Format, str] = {
    "parquet": ".parquet .pq",
    "jsonl": ".jsonl .ndjson .json",
    "csv": ".csv .tsv",
    "text": ".txt .text .md",
    "images": ".jpg .jpeg .jfif .png .webp .avif .jp2 .ppm .pgm .gif .bmp .tif .tiff",
    "audio": ".wav .flac .mp3 .ogg .opus .m4a",
    "webdataset": ".tar .tgz",
    "arrow": ".arrow .feather .ipc",
}
_FORMAT_OF_SUFFIX = {suffix: kind for kind, suffixes in _SUFFIXES.items() for suffix in suffixes.split()}
COLUMN_OF_FILES = {"images": "image", "audio": "audio"}
"""Formats in which each file is one record and its folder may be its class; and the column it becomes."""
_COMPRESSION_OF_SUFFIX = {
    ".gz": "gzip",
    ".gzip": "gzip",
    ".tgz": "gzip",
    ".zst": "zstd",
    ".zstd": "zstd",
    ".bz2": "bz2",
}


def compression_of(path: str) -> str | None:
    """pyarrow's name for the compression of a file called `path`; None if it is not compressed."""
    return _COMPRESSION_OF_SUFFIX.get(_suffix(path))


def format_of(path: str, options: SourceOptions) -> Format | None:
    """Format of the file called `path`; None if its name does not say."""
    if is_object(path):
        return cast(Format, "object")
    return options.format or _format_of_name(path)


def is_data_name(path: str, options: SourceOptions) -> bool:
    """Whether a file found in a folder is data, judging by its name."""
    guessed = _format_of_name(path)
    if options.format in ("text", "webdataset", "jsonl", "csv"):
        return True  # files of these formats have any name, and the user said that this is their format
    return guessed == options.format if options.format else guessed is not None


def is_tab_separated(path: str) -> bool:
    """Whether the name says that it is a TSV file, compressed or not."""
    return _suffix(_without_compression(path)) == ".tsv"


def is_object(path: str) -> bool:
    """Whether `path` refers to an object in this process."""
    return path.startswith("object:")


def _format_of_name(path: str) -> Format | None:
    return _FORMAT_OF_SUFFIX.get(_suffix(path)) or _FORMAT_OF_SUFFIX.get(_suffix(_without_compression(path)))


def _without_compression(path: str) -> str:
    return path[: -len(_suffix(path))] if compression_of(path) else path


def _suffix(path: str) -> str:
    name = path.split("?", 1)[0].split("#", 1)[0] if "://" in path else path  # a signed URL has more after the name
    return posixpath.splitext(name)[1].lower()

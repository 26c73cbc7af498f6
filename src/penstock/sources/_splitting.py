"""How files are cut into splits: by arithmetic on their sizes, and by the footers of parquet and Arrow files.

Line formats can be cut at any byte (see `_blocks`), so no file is opened for it. A file in which reading cannot start
in the middle is one split: compressed files, tars, CSV with quoted newlines, files on a server without ranges. Small
files that are one record each are grouped.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from penstock.errors import FormatError
from penstock.sources._columnar import split_ipc, split_parquet
from penstock.sources._csv import has_line_records
from penstock.sources._model import SourceFile, Split, byte_ranges, runs
from penstock.sources._objects import split_object
from penstock.sources._options import COLUMN_OF_FILES, SourceOptions, compression_of, format_of, is_object

# An assumption, not a measurement: text compresses to about a quarter. Tasks are sized by the uncompressed data.
_COMPRESSION_RATIO = 4
_MOST_FILES = 10_000
# Added to each file's size, so that a million empty files are not one split.
_FILE_BYTES = 4096


def class_names(files: Sequence[SourceFile]) -> tuple[str, ...]:
    """Image classes in the order of their numbers, for `SourceOptions.classes` of a later run."""
    return tuple(sorted({file.class_name for file in files if file.class_name}))


def plan_splits(
    files: Sequence[SourceFile], options: SourceOptions, target_bytes: int, *, keep_damaged: bool = False
) -> list[Split]:
    """Splits of about `target_bytes` that together hold every record of `files` once, in order.

    With `keep_damaged`, a file that cannot be cut because it is damaged is one split, which raises when it is read.

    Raises:
        FormatError: a parquet or Arrow file is damaged, and `keep_damaged` is not set.
        SchemaError: a file lacks a column of `options.columns`.
        StorageError: a file cannot be read.
    """
    if target_bytes < 1:
        raise ValueError(f"target_bytes={target_bytes}; it must be at least 1.")
    labels = _labels(files, options)
    splits: list[Split] = []
    for is_grouped, run in itertools.groupby(files, key=lambda file: _is_one_record(file, options)):
        if is_grouped:
            splits += _group(list(run), labels, options, target_bytes)
        else:
            for file in run:
                splits += _split_or_keep(file, options, target_bytes, keep_damaged)
    return splits


def _split_or_keep(file: SourceFile, options: SourceOptions, target_bytes: int, keep_damaged: bool) -> list[Split]:
    try:
        return _split_file(file, options, target_bytes)
    except FormatError:
        if not keep_damaged:
            raise
        return [Split(str(format_of(file.path, options)), file.path, 0, -1, max(file.num_bytes, 0))]


def _is_one_record(file: SourceFile, options: SourceOptions) -> bool:
    kind = format_of(file.path, options)
    return kind in COLUMN_OF_FILES or (kind == "text" and options.text_unit == "file")


def _split_file(file: SourceFile, options: SourceOptions, target_bytes: int) -> list[Split]:
    kind = format_of(file.path, options)
    assert kind is not None, "list_files names a format for every file"
    if kind == "parquet":
        return split_parquet(file, options, target_bytes)
    if kind == "arrow":
        return split_ipc(file, options, target_bytes)
    if is_object(file.path):
        return split_object(file, target_bytes)
    if kind == "webdataset" or why_unsplittable(file, options):
        return [Split(kind, file.path, 0, file.num_bytes, _expected_bytes(file))]
    return [Split(kind, file.path, begin, end, end - begin) for begin, end in byte_ranges(file.num_bytes, target_bytes)]


def why_unsplittable(file: SourceFile, options: SourceOptions) -> str:
    """Why reading cannot start in the middle of a file, in a few words; "" if it can."""
    kind = format_of(file.path, options)
    if compression_of(file.path) is not None and kind != "parquet":
        return "is compressed"
    if not file.is_seekable or file.num_bytes < 0:
        return "is on a server that does not support ranges"
    if kind == "csv" and not has_line_records(options):
        return "may have newlines in quoted fields"
    return "is one record" if kind == "text" and options.text_unit == "file" else ""


def _expected_bytes(file: SourceFile) -> int:
    return max(file.num_bytes, 0) * (_COMPRESSION_RATIO if compression_of(file.path) else 1)


def _group(
    files: list[SourceFile], labels: dict[str, int], options: SourceOptions, target_bytes: int
) -> Iterator[Split]:
    sizes = [max(file.num_bytes, 0) + _FILE_BYTES for file in files]
    for begin, end in runs(sizes, target_bytes):
        for first in range(begin, end, _MOST_FILES):
            chosen = files[first : min(first + _MOST_FILES, end)]
            yield _split_of_group(chosen, labels, options)


def _split_of_group(files: list[SourceFile], labels: dict[str, int], options: SourceOptions) -> Split:
    classes = tuple(file.class_name for file in files) if labels and files[0].class_name else ()
    return Split(
        format=str(format_of(files[0].path, options)),
        path=files[0].path,
        begin=0,
        end=len(files),
        num_bytes=sum(_expected_bytes(file) for file in files),
        paths=tuple(file.path for file in files),
        class_names=classes,
        labels=tuple(labels[name] for name in classes),
    )


def _labels(files: Sequence[SourceFile], options: SourceOptions) -> dict[str, int]:
    """Number of each class; empty if no file is in a class folder."""
    found = class_names(files)
    if not found:
        return {}
    own = (file for file in files if format_of(file.path, options) in COLUMN_OF_FILES)
    stray = next((file.path for file in own if not file.class_name), None)
    if stray is not None:
        raise ValueError(f"{stray}: this file is not in a class folder, but others are. Move it, or pass a glob.")
    classes = found if options.classes is None else options.classes
    for name in found:
        if name not in classes:
            raise ValueError(f"The class {name!r} is not one of classes={classes!r:.200}. Add it at the end.")
    return {name: number for number, name in enumerate(classes)}

"""Which bytes of which files one part of many reads: arithmetic on sizes, without opening a file.

All files in which reading can start in the middle are laid end to end, and the line is cut into equal shares. A
share owns the lines that begin in it and the row groups whose middle is in it, so every record is in exactly one,
and nobody counts records. Files that must be read from their start are dealt out whole, the largest first, each to the
part that has the least. Price: 6 µs per file in every part.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.sources._model import SourceFile, Split
from penstock.sources._options import SourceOptions, format_of
from penstock.sources._splitting import plan_splits, why_unsplittable

_MOST_BYTES_AT_ONCE = 16 << 20
"""Row groups are read one by one, small ones in runs of up to this: resuming may have to decode that much again."""


@dataclass(frozen=True, slots=True)
class FileRange:
    """A range of one file, or all of it."""

    file: SourceFile
    begin: int
    end: int
    is_whole: bool = False


def share_of(files: Sequence[SourceFile], options: SourceOptions, part: int, num_parts: int) -> list[FileRange]:
    """What part `part` of `num_parts` reads, in the order of the files."""
    assert 0 <= part < num_parts
    is_whole = [bool(why_unsplittable(file, options)) or _is_void(file, options) for file in files]
    mine = set(_deal(files, is_whole, num_parts)[part])
    total = sum(file.num_bytes for file, whole in zip(files, is_whole, strict=True) if not whole)
    first, last = total * part // num_parts, total * (part + 1) // num_parts
    ranges = []
    place = 0
    for number, file in enumerate(files):
        if number in mine:
            ranges.append(FileRange(file, 0, file.num_bytes, is_whole=True))
        if not is_whole[number]:
            begin, end = max(first - place, 0), min(last - place, file.num_bytes)
            if begin < end:
                ranges.append(FileRange(file, begin, end))
            place += file.num_bytes
    return ranges


def _is_void(file: SourceFile, options: SourceOptions) -> bool:
    """Whether a file lacks even the footer of its format: some part must open it, and say so."""
    return file.num_bytes == 0 and format_of(file.path, options) == "parquet"


def splits_of(own: FileRange, options: SourceOptions, num_parts: int, chunk_bytes: int | None) -> list[Split]:
    """What is read in turn: a file or a range, in chunks if requested, or runs of row groups."""
    file, kind = own.file, str(format_of(own.file.path, options))
    if kind == "parquet":
        return list(_row_groups(own, options, num_parts))
    size = own.end - own.begin
    if own.is_whole or chunk_bytes is None:
        return [Split(kind, file.path, own.begin, own.end, size)]
    count = max(1, round(size / chunk_bytes))
    edges = [own.begin + size * number // count for number in range(count + 1)]
    return [Split(kind, file.path, begin, end, end - begin) for begin, end in itertools.pairwise(edges)]


def _deal(files: Sequence[SourceFile], is_whole: Sequence[bool], num_parts: int) -> list[list[int]]:
    """Numbers of the whole files of each part."""
    hands: list[list[int]] = [[] for _ in range(num_parts)]
    loads = [(0, part) for part in range(num_parts)]
    whole = [number for number, whole in enumerate(is_whole) if whole]
    for number in sorted(whole, key=lambda number: -files[number].num_bytes):
        load, part = loads[0]
        hands[part].append(number)
        # Plus one, so that files of unknown size are dealt out in turn.
        heapq.heapreplace(loads, (load + max(files[number].num_bytes, 0) + 1, part))
    return hands


def _row_groups(own: FileRange, options: SourceOptions, num_parts: int) -> Iterator[Split]:
    """Runs of row groups whose middle is in the range, judging by the size of the columns that are read."""
    target = min(max(own.file.num_bytes // (4 * num_parts), 1), _MOST_BYTES_AT_ONCE)
    runs = plan_splits([own.file], options, target)
    total = max(sum(run.num_bytes for run in runs), 1)
    done = 0
    for run in runs:
        middle = (2 * done + run.num_bytes) * own.file.num_bytes // (2 * total)
        if own.is_whole or own.begin <= min(middle, own.file.num_bytes - 1) < own.end:
            yield run
        done += run.num_bytes

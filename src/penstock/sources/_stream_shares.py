"""What a stream is, and which bytes each part reads: of an epoch, or of what is left of one when parts change.

A part's share is arithmetic on sizes, without opening a file. All files in which reading can start in the middle are
laid end to end, and the line is cut into equal shares. A share owns the lines that begin in it and the row groups whose
middle is in it, so every record is in exactly one, and nobody counts records. Files that must be read from their start
are dealt out whole, the largest first, each to the part that has the least. Price: 6 µs per file in every part.

A *strand* is what a part reads in turn, through one shuffle buffer. When other parts go on with an epoch, records wait
in the buffers and blocks of those before, so a strand is cut behind the last block that it read. What it had begun
stays one strand, which some part hands out first, from the same buffer; the rest goes back to the line, and is shared
again.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import heapq
import itertools
import posixpath
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from penstock.errors import SchemaError, check_choice
from penstock.identity import digest
from penstock.order import derive_key
from penstock.sources._listing import Source, list_files
from penstock.sources._model import SourceFile, Split
from penstock.sources._options import Format, SourceOptions, TextUnit, format_of
from penstock.sources._splits import plan_splits, resolve_types, why_unsplittable
from penstock.sources._stream_shuffle import permutation

OnError = Literal["raise", "skip"]

_FORMATS = ("csv", "jsonl", "parquet", "text")
_LOCAL_BLOCK_BYTES = 256 << 10  # records of a block stay in the processor's cache; 4 MB take 1.5 times as long


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides which records come, and in which order."""

    files: tuple[SourceFile, ...]
    options: SourceOptions
    shuffle_buffer: int = 0
    """Records held back to draw from; 0 keeps the order of the files. Costs the memory of that many records, and
    reading them at the start and when resuming."""
    seed: int = 0
    """Decides the shuffle, together with the epoch and the part."""
    on_error: OnError = "raise"
    """What happens at a bad record: "raise" stops and names it, "skip" leaves it out, counts it, and logs it."""

    def __post_init__(self) -> None:
        if type(self.shuffle_buffer) is not int or self.shuffle_buffer < 0:
            raise ValueError(f"shuffle_buffer={self.shuffle_buffer!r}; give a number of records, or 0 for no shuffle.")
        if type(self.seed) is not int:
            raise TypeError(f"seed={self.seed!r}; it must be an integer.")
        check_choice("on_error", self.on_error, get_args(OnError))

    @functools.cached_property
    def whole(self) -> list[int]:
        """Numbers of the files that one part reads from start to end: those that cannot be entered in the middle, and
        parquet files that lack even a footer, which some part must open, and say so."""
        return [
            number
            for number, file in enumerate(self.files)
            if why_unsplittable(file, self.options)
            or (file.num_bytes == 0 and format_of(file.path, self.options) == "parquet")
        ]

    @functools.cached_property
    def places(self) -> list[int]:
        """Where each file begins on the line of all others; a whole file has no length there."""
        whole = set(self.whole)
        sizes = (0 if number in whole else file.num_bytes for number, file in enumerate(self.files))
        return list(itertools.accumulate(sizes, initial=0))

    @functools.cached_property
    def facts(self) -> dict[str, Any]:
        """What a state must agree with, short enough to be part of it. Files are identified by name and size."""
        names = [(posixpath.basename(file.path), file.num_bytes) for file in self.files]
        return {
            "files": f"{len(self.files):,} files of {sum(size for _, size in names):,} bytes ({_digest(names)})",
            "reading": {name: value for name, value in self.options.identity.items() if value is not None},
            "shuffle_buffer": self.shuffle_buffer,
            "seed": self.seed,
            "on_error": self.on_error,
        }

    @functools.cached_property
    def writing(self) -> str:
        """Changes when a file is rewritten, even with the same size."""
        return _digest(file.identity for file in self.files)


def make_recipe(
    paths: Source,
    *,
    format: Format | None,
    columns: Sequence[str] | None,
    text_unit: TextUnit | None,
    reading: SourceOptions | None,
    shuffle_buffer: int,
    seed: int,
    on_error: OnError,
) -> Recipe:
    """List the files, and collect all choices.

    Raises:
        FileNotFoundError: a path matches nothing.
        SchemaError: a column other than "text" was requested from a text file.
        ValueError: the format of a file cannot be streamed, or a choice does not exist.
    """
    options = reading or SourceOptions()
    if isinstance(columns, str):
        raise TypeError(f"columns={columns!r} is one string; give a list, as in [{columns!r}].")
    options = dataclasses.replace(
        options,
        format=format or options.format,
        columns=options.columns if columns is None else tuple(columns),
        text_unit=text_unit or ("separator" if options.separator else "line"),
    )
    files = tuple(list_files(paths, options))
    _check_formats(files, options)
    if not any("://" in file.path for file in files):
        options = dataclasses.replace(options, batch_bytes=min(options.batch_bytes, _LOCAL_BLOCK_BYTES))
    options = resolve_types(files, options)
    return Recipe(files=files, options=options, shuffle_buffer=shuffle_buffer, seed=seed, on_error=on_error)


def _check_formats(files: Iterable[SourceFile], options: SourceOptions) -> None:
    for file in files:
        kind = format_of(file.path, options)
        if kind not in _FORMATS:
            raise ValueError(
                f"{file.path} is {kind}; a stream reads {', '.join(_FORMATS)}. `penstock.prepare` reads the others too."
            )
        if kind == "text" and options.columns not in (None, ("text",)):
            raise SchemaError(f"{file.path}: columns={list(options.columns)}; records of text files have only 'text'.")


def _digest(parts: Iterable[Any]) -> str:
    return digest("".join(f"{part!r}\n" for part in parts), 8)


Interval = tuple[int, int]

_CHUNK_BYTES = 32 << 20
"""Chunks of this size are visited in shuffled order, because a buffer alone cannot mix distant records."""
_MOST_BYTES_AT_ONCE = 16 << 20
"""Row groups are read one by one, small ones in runs of up to this: resuming may have to decode that much again."""


class Progress(NamedTuple):
    """How far a part is. A state holds this many numbers for each."""

    part: int
    strand: int = 0
    """Those before it are handed out."""
    num_records: int = 0
    """Records of the strand that were handed out."""
    num_read: int = 0
    """Records of the strand that were read by then."""
    num_skipped: int = 0
    record: int = 0
    """Where a block begins from which all that was not handed out is read again: records of the strand before it,"""
    skipped: int = 0
    """bad ones before it,"""
    piece: int = 0
    split: int = 0
    """and which piece and split of the strand it is in;"""
    place: int | None = None
    """where `read_rows` starts; None for the start of the split."""
    last_piece: int | None = None
    last_split: int = 0
    """Where the latest block is that was read; unknown in states of version 1."""
    last_end: int | None = None
    """Where that block ends; None if reading cannot start there."""


class Begun(NamedTuple):
    """A strand that other parts had begun, as far as they had read."""

    part: int
    """Whose shuffle buffer it was."""
    num_records: int
    num_read: int
    record: int
    skipped: int
    place: int | None
    splits: Sequence[tuple[int, int, int]]
    """Number of the file, begin, end."""


class Left(NamedTuple):
    """What there is to share of an epoch."""

    num_parts: int
    """Parts that the epoch began with: they decide which row groups are read together."""
    line: Sequence[Interval]
    """Bytes of the line."""
    whole: Sequence[Interval]
    """Which of the whole files."""
    begun: Sequence[Begun]


@dataclass(frozen=True, slots=True)
class FileRange:
    """A range of one file, or all of it."""

    number: int
    file: SourceFile
    begin: int
    end: int
    is_whole: bool = False


class Chunk(NamedTuple):
    """What is read in one go, and which bytes of the file stand for it on the line."""

    split: Split
    begin: int
    end: int


def everything(recipe: Recipe, num_parts: int) -> Left:
    """A whole epoch."""
    return Left(num_parts, [(0, recipe.places[-1])], [(0, len(recipe.whole))], [])


def strands_of_parts(recipe: Recipe, left: Left, num_parts: int, epoch: int) -> list[list[Strand]]:
    """What each part reads: what others had begun, then ranges of files in the order of the files."""
    ranges: list[list[FileRange]] = [[] for _ in range(num_parts)]
    begun: list[list[Begun]] = [[] for _ in range(num_parts)]
    wholes = [recipe.whole[at] for begin, end in left.whole for at in range(begin, end)]
    sizes = [recipe.files[number].num_bytes for number in wholes]
    for item, part in _deal(
        [*sizes, *(sum(end - begin for _, begin, end in each.splits) for each in left.begun)], num_parts
    ):
        if item < len(wholes):
            file = recipe.files[wholes[item]]
            ranges[part].append(FileRange(wholes[item], file, 0, file.num_bytes, is_whole=True))
        else:
            begun[part].append(left.begun[item - len(wholes)])
    for part, interval in _cut(left.line, num_parts):
        ranges[part] += _ranges_of(recipe, *interval)
    return [
        [
            *(Strand(recipe, epoch, each.part, [], left.num_parts, each) for each in begun[part]),
            Strand(recipe, epoch, part, sorted(ranges[part], key=_place_of), left.num_parts),
        ]
        for part in range(num_parts)
    ]


class Strand:
    """What a part reads in turn: pieces, each of which is chunks."""

    def __init__(
        self, recipe: Recipe, epoch: int, part: int, ranges: list[FileRange], num_parts: int, begun: Begun | None = None
    ) -> None:
        self.part = part
        self.begun = begun
        self._recipe, self._epoch, self._num_parts = recipe, epoch, num_parts
        self.pieces = [ranges[number] for number in self._order(len(ranges), "pieces")]
        self.num_pieces = len(self.pieces) if begun is None else 1

    def key(self, *labels: int | str) -> int:
        """What random numbers are drawn by."""
        return derive_key(self._recipe.seed, "stream", self._epoch, self.part, *labels)

    def at(self, progress: Progress) -> Progress:
        """How far it is; a part that has not begun with it stands where others left it."""
        if self.begun is None or progress.num_read:
            return progress
        _, num_records, num_read, record, skipped, place, _ = self.begun
        return Progress(*progress[:2], num_records, num_read, skipped, record, skipped, place=place)

    def chunks(self, piece: int) -> list[Chunk]:
        """What a piece is read in: all of it, or if it is shuffled in parts; or runs of row groups."""
        if self.begun is not None:
            return [Chunk(_split(self._recipe, *each), 0, 0) for each in self.begun.splits]
        chunks = _chunks(self._recipe, self.pieces[piece], self._num_parts)
        return [chunks[number] for number in self._order(len(chunks), "splits", piece)]

    def _order(self, size: int, *labels: int | str) -> list[int]:
        return permutation(self.key(*labels), size) if self._recipe.shuffle_buffer else list(range(size))


def left_after(recipe: Recipe, left: Left, at: Sequence[Progress], epoch: int) -> Left:
    """What is left when parts are as far as `at` says, all of them in order."""
    line: list[Interval] = []
    whole: list[Interval] = []
    begun: list[Begun] = []
    for progress, strands in zip(at, strands_of_parts(recipe, left, len(at), epoch), strict=True):
        for number, strand in enumerate(strands[progress.strand :], progress.strand):
            now = progress if number == progress.strand else Progress(progress.part, number)
            ranges = _cut_strand(recipe, strand, strand.at(now), begun)
            whole += [_interval(bisect.bisect(recipe.whole, each.number) - 1) for each in ranges if each.is_whole]
            places = [(recipe.places[each.number], each) for each in ranges if not each.is_whole]
            line += [(place + each.begin, place + each.end) for place, each in places]
    return Left(left.num_parts, _merged(line), _merged(whole), begun)


def _cut_strand(recipe: Recipe, strand: Strand, now: Progress, begun: list[Begun]) -> list[FileRange]:
    """Add what was begun of a strand; return what was not."""
    if strand.begun is None and now.num_read == 0:
        return strand.pieces
    last_piece = 0 if strand.begun is not None or now.last_piece is None else now.last_piece
    splits: list[tuple[int, int, int]] = []
    rest: list[FileRange] = []
    for piece in range(now.piece, last_piece + 1):
        chunks = strand.chunks(piece)
        first = now.split if piece == now.piece else 0
        if strand.begun is not None:
            splits += strand.begun.splits[first:]
            continue
        own = strand.pieces[piece]
        is_cut = piece == last_piece and not own.is_whole
        last = now.last_split + 1 if is_cut else len(chunks)
        splits += [(own.number, chunk.split.begin, chunk.split.end) for chunk in chunks[first:last]]
        if is_cut:
            if now.last_end is not None and now.last_end < chunks[last - 1].end:
                splits[-1] = (own.number, chunks[last - 1].begin, now.last_end)
                rest.append(FileRange(own.number, own.file, now.last_end, chunks[last - 1].end))
            rest += [FileRange(own.number, own.file, chunk.begin, chunk.end) for chunk in chunks[last:]]
    begun.append(Begun(strand.part, now.num_records, now.num_read, now.record, now.skipped, now.place, splits))
    return rest + strand.pieces[last_piece + 1 :]


def _interval(number: int) -> Interval:
    return number, number + 1


def _merged(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and merged[-1][1] == begin:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((begin, end))
    return merged


def _deal(sizes: Sequence[int], num_parts: int) -> Iterator[tuple[int, int]]:
    """(item, part) for each item, the largest first, each to the part that has the least."""
    loads = [(0, part) for part in range(num_parts)]
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        load, part = loads[0]
        yield item, part
        # Plus one, so that files of unknown size are dealt out in turn.
        heapq.heapreplace(loads, (load + max(sizes[item], 0) + 1, part))


def _cut(line: Sequence[Interval], num_parts: int) -> Iterator[tuple[int, Interval]]:
    """(part, interval): equal shares of a line."""
    total = sum(end - begin for begin, end in line)
    part = done = 0
    for begin, end in line:
        while begin < end:
            while total * (part + 1) // num_parts <= done:
                part += 1
            size = min(end - begin, total * (part + 1) // num_parts - done)
            yield part, (begin, begin + size)
            begin, done = begin + size, done + size


def _ranges_of(recipe: Recipe, begin: int, end: int) -> Iterator[FileRange]:
    """The ranges of files at a stretch of the line."""
    for number in range(bisect.bisect_right(recipe.places, begin) - 1, len(recipe.files)):
        place, file = recipe.places[number], recipe.files[number]
        if place >= end:
            return
        if max(begin, place) < (last := min(end, recipe.places[number + 1])):
            yield FileRange(number, file, max(begin, place) - place, last - place)


def _place_of(own: FileRange) -> Interval:
    return own.number, own.begin


def _split(recipe: Recipe, number: int, begin: int, end: int) -> Split:
    path = recipe.files[number].path
    return Split(str(format_of(path, recipe.options)), path, begin, end, end - begin)


def _chunks(recipe: Recipe, own: FileRange, num_parts: int) -> list[Chunk]:
    if format_of(own.file.path, recipe.options) == "parquet":
        return _row_groups(own, recipe.options, num_parts)
    size = own.end - own.begin
    count = 1 if own.is_whole or not recipe.shuffle_buffer else max(1, round(size / _CHUNK_BYTES))
    edges = [own.begin + size * number // count for number in range(count + 1)]
    return [Chunk(_split(recipe, own.number, *pair), *pair) for pair in itertools.pairwise(edges)]


def _row_groups(own: FileRange, options: SourceOptions, num_parts: int) -> list[Chunk]:
    """Runs of row groups whose middle is in the range, judging by the size of the columns that are read."""
    target = min(max(own.file.num_bytes // (4 * num_parts), 1), _MOST_BYTES_AT_ONCE)
    runs = plan_splits([own.file], options, target)
    total = max(sum(run.num_bytes for run in runs), 1)
    done = 0
    mine: list[tuple[Split, int]] = []
    for run in runs:
        middle = min((2 * done + run.num_bytes) * own.file.num_bytes // (2 * total), own.file.num_bytes - 1)
        if own.is_whole or own.begin <= middle < own.end:
            mine.append((run, middle))
        done += run.num_bytes
    edges = [own.begin, *(middle for _, middle in mine[1:]), own.end]
    return [Chunk(run, *pair) for (run, _), pair in zip(mine, itertools.pairwise(edges), strict=False)]

"""What a stream is: files, how they are read and shuffled, which bytes each part reads, what a state must agree with.

A part's share is arithmetic on sizes, without opening a file. All files in which reading can start in the middle are
laid end to end, and the line is cut into equal shares. A share owns the lines that begin in it and the row groups whose
middle is in it, so every record is in exactly one, and nobody counts records. Files that must be read from their start
are dealt out whole, the largest first, each to the part that has the least. Price: 6 µs per file in every part.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import posixpath
import reprlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from penstock.errors import SchemaError, StateError, check_choice
from penstock.identity import digest
from penstock.shapes import COUNT, Either, find_mismatch
from penstock.sources._listing import Source, list_files
from penstock.sources._model import SourceFile, Split
from penstock.sources._options import Format, SourceOptions, TextUnit, format_of
from penstock.sources._splits import plan_splits, resolve_types, why_unsplittable

OnError = Literal["raise", "skip"]

_FORMATS = ("csv", "jsonl", "parquet", "text")
_LOCAL_BLOCK_BYTES = 256 << 10  # records of a block stay in the processor's cache; 4 MB take 1.5 times as long
STATE_VERSION = 1
_FIELDS = {"version", "facts", "writing", "part", "num_parts", "epoch", "num_records", "num_read", "from"}
_START = {"record": 0, "skipped": 0, "piece": 0, "split": 0, "place": None}
_PLAIN = Either(str, int, float, bool, None, [Either(str, int)])
_READING = {str: Either(_PLAIN, {str: str})}  # options by name; one of them, `types`, maps columns to types
_FACTS = {str: Either(_PLAIN, _READING)}
_SHAPE = {
    "writing": str,
    "part": Either(None, COUNT),
    "num_parts": Either(None, COUNT),
    "epoch": COUNT,
    "num_records": COUNT,
    "num_read": COUNT,
    "from": {name: Either(None, COUNT) if first is None else COUNT for name, first in _START.items()},
}


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


def start_state(recipe: Recipe, epoch: int) -> dict[str, Any]:
    """The state before the first record of an epoch; any part may start from it."""
    return {
        "version": STATE_VERSION,
        "facts": recipe.facts,
        "writing": recipe.writing,
        "part": None,
        "num_parts": None,
        "epoch": epoch,
        "num_records": 0,
        "num_read": 0,
        "num_skipped": 0,
        "from": dict(_START),
    }


def check_state(state: Mapping[str, Any], recipe: Recipe) -> None:
    """Raise `StateError` if the state is not one of this stream; warn if files were rewritten since."""
    if not isinstance(state, Mapping) or not state.keys() >= _FIELDS:
        raise StateError(f"Not the state of a stream: {reprlib.repr(state)} lacks {', '.join(sorted(_FIELDS))}.")
    if type(state["version"]) is not int or state["version"] != STATE_VERSION:
        raise StateError(
            f"The state has version {reprlib.repr(state['version'])}; this Penstock reads version {STATE_VERSION}."
        )
    _check(state, {"facts": _FACTS})
    if _facts_of(state, recipe) != recipe.facts:
        raise StateError(f"The state belongs to another stream. {_difference(state['facts'], recipe.facts)}")
    _check(state, _SHAPE)
    _check_counts(state, recipe.shuffle_buffer)
    if state["writing"] != recipe.writing:
        warnings.warn(
            "The files of this stream were rewritten since the state was saved, with the same names and sizes. "
            "If their contents changed as well, the stream resumes at the wrong records.",
            stacklevel=3,
        )


def check_part(state: Mapping[str, Any], part: int, num_parts: int) -> None:
    """Raise `StateError` if the state is that of another part (rank and worker), or the number of parts differs."""
    if state["part"] is None:
        return
    if state["num_parts"] != num_parts:
        raise StateError(
            f"The state was saved with the files split into {state['num_parts']} parts (ranks x workers), but now "
            f"there are {num_parts}. A stream resumes with as many ranks and workers as before; "
            "data made by `penstock.prepare` can be split differently at any time."
        )
    if state["part"] != part:
        raise StateError(
            f"The state is that of part {state['part']} of {num_parts}, but this is part {part}. "
            "Each rank and each worker must load the state that it saved."
        )


def _check(state: Mapping[str, Any], shape: Any) -> None:
    if wrong := find_mismatch(state, shape, "state"):
        raise _damaged(wrong)


def _check_counts(state: Mapping[str, Any], shuffle_buffer: int) -> None:
    """At most a buffer of records is read ahead; a state that claims more would make us allocate for them."""
    num_out, num_read = state["num_records"], state["num_read"]
    if num_read > num_out + shuffle_buffer:
        raise _damaged(f"{num_read:,} records were read for {num_out:,} that were handed out")
    if state["from"].keys() != _START.keys():
        raise _damaged(f"state['from'] has the keys {reprlib.repr(sorted(state['from']))}")


def _damaged(wrong: str) -> StateError:
    return StateError(f"The state is damaged: {wrong}. Resume from another one.")


def _facts_of(state: Mapping[str, Any], recipe: Recipe) -> Any:
    """What the stream was. One that stopped at a bad record may resume by skipping it: until then both are the same."""
    facts = state["facts"]
    stops = isinstance(facts, Mapping) and facts.get("on_error") == "raise"
    return {**facts, "on_error": recipe.on_error} if stops else facts


def _difference(theirs: Any, ours: Mapping[str, Any]) -> str:
    names = [name for name in ours if not isinstance(theirs, Mapping) or theirs.get(name) != ours[name]]
    changes = "; ".join(f"{name} was {_value_in(theirs, name)}, is {ours[name]}" for name in names)
    return f"Different: {changes}."


def _value_in(theirs: Any, name: str) -> Any:
    return theirs.get(name, "unknown") if isinstance(theirs, Mapping) else "unknown"


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

"""What a stream is: files, and how they are read and shuffled."""

import dataclasses
import functools
import itertools
import posixpath
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from penstock.errors import SchemaError, check_choice
from penstock.identity import digest
from penstock.sources._listing import Source, list_files
from penstock.sources._model import SourceFile
from penstock.sources._options import Format, SourceOptions, TextUnit, format_of
from penstock.sources._splits import resolve_types, why_unsplittable

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

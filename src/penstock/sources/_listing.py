"""Which files a source means: a path, a folder, a glob, a URL, an object, or a list of those.

Files come sorted by name, each once. What is not data is left out by name only, and only inside folders:
hidden files, those that begin with an underscore, as tools write beside data, and datasets that Penstock wrote
there. A folder of several formats is not guessed about: it is an error that says what is in it.
"""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.sources._formats import format_of
from penstock.sources._listing_local import expand_local
from penstock.sources._listing_remote import expand_remote
from penstock.sources._model import SourceFile
from penstock.sources._objects import IterableSource, is_table, list_object
from penstock.sources._options import SourceOptions
from penstock.sources._remote import is_remote

Source = str | os.PathLike[str] | IterableSource | Iterable[Any]


def list_files(sources: Source, options: SourceOptions) -> list[SourceFile]:
    """Files that `sources` means, sorted by name; objects first, in the order given.

    Raises:
        FileNotFoundError: a source matches nothing.
        ValueError: the names do not tell one format.
        StorageError: a remote store did not answer.
    """
    objects: list[SourceFile] = []
    files: dict[str, SourceFile] = {}
    for number, source in enumerate(_each(sources)):
        if isinstance(source, (str, os.PathLike)):
            files.update({file.path: file for file in _expand(os.fspath(source), options)})
        else:
            objects += list_object(source, number)
    return objects + [files[path] for path in sorted(files)]


def _each(sources: Source) -> Sequence[Any]:
    """The sources of a list, or the one that was given."""
    if isinstance(sources, (str, os.PathLike, IterableSource)) or is_table(sources):
        return [sources]
    if isinstance(sources, (list, tuple)) and not any(isinstance(each, Mapping) for each in sources):
        if not sources:
            raise ValueError("The list of sources is empty; give at least one path.")
        return sources
    if not isinstance(sources, Iterable) or isinstance(sources, Mapping):
        raise TypeError(f"A source is a path, a URL, an iterable of dicts or a list of these, not {sources!r:.80}.")
    records: Iterable[Any] = sources
    return [IterableSource(records=records)]


def _expand(source: str, options: SourceOptions) -> list[SourceFile]:
    files = expand_remote(source, options) if is_remote(source) else expand_local(source, options)
    if not files:
        brackets = " A bracket in a name is written [[] in a glob." if "[" in source else ""
        raise FileNotFoundError(f"{source}: no file matches. Check the spelling, and quote globs in a shell.{brackets}")
    _check_formats(source, files, options)
    if format_of(files[0].path, options) == "images":
        return files
    return [dataclasses.replace(file, class_name="") for file in files]


def _check_formats(source: str, files: list[SourceFile], options: SourceOptions) -> None:
    formats = collections.Counter(format_of(file.path, options) for file in files)
    unknown = next((file.path for file in files if format_of(file.path, options) is None), None)
    if unknown is not None:
        raise ValueError(f"{unknown}: the name does not tell the format. Pass format=, as in format='jsonl'.")
    if len(formats) > 1:
        found = ", ".join(f"{count} {name}" for name, count in sorted(formats.items(), key=str))
        raise ValueError(f"{source}: files of several formats ({found}). Pass a narrower glob, or format= (--format).")

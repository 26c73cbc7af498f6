"""Which files a source means: a path, a folder, a glob, a URL, an object, or a list of those.

Files come sorted by name, each once. What is not data is left out only by name, and only inside folders:
hidden files, those that begin with an underscore, which tools write beside data, and datasets that Penstock wrote
there. If a folder has several formats, nothing is guessed: it is an error that says what is in it.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import os
import posixpath
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.errors import printable
from penstock.filesystem import similar_path
from penstock.sources._listing_local import expand_local, first_folder, is_wanted_folder, is_wanted_name, skipped_in
from penstock.sources._model import SourceFile
from penstock.sources._objects import IterableSource, is_table, list_object
from penstock.sources._options import COLUMN_OF_FILES, FORMATS, SourceOptions, format_of, is_data_name
from penstock.sources._remote import RemoteStore
from penstock.sources._urls import Url, address_of, is_remote

_log = logging.getLogger(__name__)
_HOW_TO_TELL = "Say what format it is, as in reading=SourceOptions(format='jsonl') or --format jsonl."
_SHOWN_KINDS = 5
_VERSION_KEYS = ("ETag", "etag", "md5Hash", "crc32c", "generation", "LastModified", "Last-Modified", "mtime", "created")
Source = str | os.PathLike[str] | IterableSource | Iterable[Any]


def list_files(sources: Source, options: SourceOptions) -> list[SourceFile]:
    """The files that `sources` means, sorted by name, each once however often it is named; objects first, as given.

    Raises:
        FileNotFoundError: a source matches nothing.
        ValueError: the names do not say which format, or say several.
        StorageError: a remote store did not answer.
    """
    objects: dict[str, SourceFile] = {}
    files: dict[str, SourceFile] = {}
    num_times: collections.Counter[str] = collections.Counter()
    for number, source in enumerate(_each(sources)):
        if isinstance(source, (str, os.PathLike)):
            path = _path_of(source)
            num_times[path] += 1
            _add(files, _expand(path, options))
        else:
            found = {file.path: file for file in list_object(source, number)}
            num_times.update(found.keys())
            objects.update(found)
    _warn_about_repeats(num_times)
    return [*objects.values(), *(files[path] for path in sorted(files.keys() - objects.keys()))]


def _path_of(source: str | os.PathLike[str]) -> str:
    text = os.fspath(source)
    return Url.of(text) if is_remote(text) else text


def _add(files: dict[str, SourceFile], found: Iterable[SourceFile]) -> None:
    for file in found:
        known = files.setdefault(file.path, file)
        if known.identity != file.identity and address_of(known.path) != address_of(file.path):
            raise ValueError(
                f"{file.path}: two addresses differ only in their signatures, but their data differs. "
                "Give each file its own path."
            )


def list_skipped(sources: Source, options: SourceOptions) -> list[str]:
    """Files in the local folders among `sources` that `list_files` leaves out because of their names."""
    paths = (os.fspath(each) for each in _each(sources) if isinstance(each, (str, os.PathLike)))
    return sorted({skipped for path in paths if not is_remote(path) for skipped in skipped_in(path, options)})


def _warn_about_repeats(num_times: Mapping[str, int]) -> None:
    """Warn that a file that is named twice counts once; overlapping globs are common, and not warned about."""
    for name, count in num_times.items():
        if count > 1:
            _log.warning(
                "%s is given %d times; each file is read once. penstock.mix repeats data.", printable(name), count
            )


def _each(sources: Source) -> Sequence[Any]:
    """The sources of a list, or the single one given."""
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
    files = _expand_remote(source, options) if is_remote(source) else expand_local(source, options)
    if not files and not is_remote(source):
        _check_unread(source, options)
    if not files and os.path.isdir(os.path.expanduser(source)):
        raise FileNotFoundError(f"{source}: the folder has no files to read.")
    if not files:
        brackets = " In a glob, write [[] for a bracket in a name." if "[" in source else ""
        guess = "" if is_remote(source) else similar_path(os.path.expanduser(source))
        raise FileNotFoundError(
            f"{source}: no file matches.{guess or ' Check the spelling, and quote globs in a shell.'}{brackets}"
        )
    _check_formats(source, files, options)
    if format_of(files[0].path, options) in COLUMN_OF_FILES:
        return files
    return [dataclasses.replace(file, class_name="") if file.class_name else file for file in files]


def _check_formats(source: str, files: list[SourceFile], options: SourceOptions) -> None:
    formats = collections.Counter(format_of(file.path, options) for file in files)
    if None in formats:
        unknown = next(file.path for file in files if format_of(file.path, options) is None)
        raise ValueError(f"{unknown}: unrecognised file extension. {_HOW_TO_TELL}")
    if len(formats) > 1:
        ranked = formats.most_common()
        found = ", ".join(f"{count:,} {name}" for name, count in ranked)
        usual, (rare, count) = ranked[0][0], ranked[-1]
        odd = next(file.path for file in files if format_of(file.path, options) == rare)
        shown = odd if count == 1 else f"{odd}, …"
        raise ValueError(
            f"{source}: files of several formats ({found}: {shown}). Use a narrower glob, or say which to read: "
            f"reading=SourceOptions(format={usual!r}), --format {usual}."
        )


def _check_unread(source: str, options: SourceOptions) -> None:
    """Raise an error that says so if a folder has files, but none that can be read."""
    names = list(skipped_in(source, options))
    if not names:
        return
    kinds = collections.Counter(posixpath.splitext(name)[1].lower() or "no extension" for name in names)
    found = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common(_SHOWN_KINDS))
    if any(is_data_name(name, options) for name in names):
        raise FileNotFoundError(
            f"{source}: all files that can be read have names, or are in folders with names, that begin with an "
            f"underscore ({found}). Give them as paths or by a glob; images and sounds also by their format, as in "
            "reading=SourceOptions(format='images') (--format)."
        )
    raise FileNotFoundError(
        f"{source}: no file has a recognised extension ({found}). If these are {', '.join(FORMATS[:-1])} or "
        f"{FORMATS[-1]}, pass reading=SourceOptions(format=…) (--format); if not, read them yourself and give the rows "
        "as dicts."
    )


def _expand_remote(url: str, options: SourceOptions) -> list[SourceFile]:
    """Files of a URL, a remote folder or a glob."""
    store = RemoteStore(url, options)
    if _is_glob(url):
        found: dict[str, dict[str, Any]] = store.ask("glob", store.path, detail=True)
        return [_describe_remote(store, info) for info in found.values() if info.get("type") != "directory"]
    try:
        info = store.info()
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{url}: no such file. Check the address.") from error
    if info.get("type") == "directory":
        return _expand_remote_folder(store, options)
    return [_describe_remote(store, {**info, "name": store.path})]


def _is_glob(url: str) -> bool:
    # In a web address, "?" begins the query.
    return "*" in url if url.startswith("http") else any(mark in url for mark in "*?[")


def _expand_remote_folder(store: RemoteStore, options: SourceOptions) -> list[SourceFile]:
    found: dict[str, dict[str, Any]] = store.ask("find", store.path, detail=True)
    root = store.path.rstrip("/") + "/"
    files = []
    for name, info in found.items():
        relative = name.removeprefix(root)
        if all(is_wanted_folder(part, options) for part in relative.split("/")[:-1]) and is_wanted_name(
            posixpath.basename(name), options
        ):
            files.append(_describe_remote(store, info, first_folder(relative)))
    return files


def _describe_remote(store: RemoteStore, info: dict[str, Any], class_name: str | None = None) -> SourceFile:
    path = Url.of(str(store.filesystem.unstrip_protocol(info["name"])))
    size = info.get("size")
    num_bytes = -1 if size is None else int(size)
    version = next((str(info[key]) for key in _VERSION_KEYS if info.get(key)), "")
    folder = posixpath.basename(posixpath.dirname(path)) if class_name is None else class_name
    return SourceFile(path, num_bytes, f"{num_bytes}-{version}", folder, store.has_ranges(info["name"], info))

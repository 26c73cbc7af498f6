"""Which files a source means: a path, a folder, a glob, a URL, an object, or a list of those.

Files come sorted by name, each once. What is not data is left out only by name, and only inside folders:
hidden files, those that begin with an underscore, which tools write beside data, and datasets that Penstock wrote
there. If a folder has several formats, nothing is guessed: it is an error that says what is in it.
"""

import collections
import dataclasses
import functools
import glob
import json
import logging
import os
import posixpath
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import FormatError, printable
from penstock.filesystem import open_regular, similar_path
from penstock.sources._model import SourceFile
from penstock.sources._objects import IterableSource, files_of_object, is_table, list_object
from penstock.sources._options import COLUMN_OF_FILES, FORMATS, SourceOptions, format_of, is_data_name
from penstock.sources._remote import RemoteStore, Url, address_of, is_remote

_log = logging.getLogger(__name__)
_HOW_TO_TELL = "Say what format it is, as in reading=SourceOptions(format='jsonl') or --format jsonl."
_SHOWN_KINDS = 5
_VERSION_KEYS = ("ETag", "etag", "md5Hash", "crc32c", "generation", "LastModified", "Last-Modified", "mtime", "created")


_MANIFEST_START = 64


_STATE_NAME = "state.json"  # of a Hugging Face dataset


_NOT_DATA = ("readme", "license", "licence", "dataset_info", "dataset_infos", "dataset_dict", "state")
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
            paths = files_of_object(source)
            found = list_local_files(paths) if paths else [list_object(source, number)]
            num_times.update({file.path for file in found})
            objects.update({file.path: file for file in found})
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


def expand_local(source: str, options: SourceOptions) -> list[SourceFile]:
    """Files of a path, a folder or a glob."""
    path = _absolute(source)
    if os.path.isdir(path):
        return _expand_folder(path, options, class_from=path)
    if os.path.exists(path):
        return [_describe(path)]
    files = []
    is_output = functools.cache(_is_dataset)
    for match in sorted(glob.glob(path, recursive=True)):
        if os.path.isdir(match):
            if "**" not in source:
                files += _expand_folder(match, options, class_from=os.path.dirname(match))
        elif (os.path.isfile(match) or os.path.islink(match)) and not is_output(os.path.dirname(match)):
            files.append(_describe(match))
    return files


def _absolute(source: str) -> str:
    return os.path.abspath(os.path.expanduser(source.removeprefix("file://")))


def list_local_files(paths: Sequence[str]) -> list[SourceFile]:
    """These files, in this order."""
    return [_describe(os.path.abspath(path)) for path in paths]


def changed_since(files: Iterable[SourceFile]) -> list[str]:
    """Paths of local files that have changed since they were listed, or are gone."""
    return [file.path for file in files if os.path.isabs(file.path) and _identity_now(file.path) != file.identity]


def _identity_now(path: str) -> str | None:
    try:
        return _identity(os.stat(path))
    except OSError:
        return None


def skipped_in(source: str, options: SourceOptions) -> Iterator[str]:
    """Files in a folder that are not listed because of their names, but may well be data."""
    path = _absolute(source)
    if os.path.isdir(path) and not os.path.exists(os.path.join(path, _STATE_NAME)):
        yield from _walk(path, options, set(), is_worth_a_word, _is_private_data)


def is_wanted_name(name: str, options: SourceOptions) -> bool:
    """Whether a file found in a folder is data."""
    return is_visible_name(name, options) and is_data_name(name, options)


def is_visible_name(name: str, options: SourceOptions) -> bool:
    """Whether a file found in a folder is not one of those that tools write beside data."""
    if name.startswith(".") or (name.startswith("_") and options.format not in COLUMN_OF_FILES):
        return False
    return not _is_description(name, options)


def is_worth_a_word(name: str, options: SourceOptions) -> bool:
    """Whether a file in a folder is skipped although it may well be data, so that the user should know."""
    if is_visible_name(name, options):
        return not is_data_name(name, options)
    return name.startswith("_") and os.path.splitext(name)[1] != "" and is_data_name(name, options)


def _is_private_data(name: str, options: SourceOptions) -> bool:
    """Whether a file in a folder that begins with an underscore may well be data."""
    return is_data_name(name, options) and not _is_description(name, options)


def _is_description(name: str, options: SourceOptions) -> bool:
    """Whether a name is one of those under which people and tools describe data."""
    return options.format is None and name.lower().split(".", 1)[0] in _NOT_DATA


def is_wanted_folder(name: str, options: SourceOptions) -> bool:
    """Whether a folder inside a folder may hold data."""
    return not name.startswith(".") and (options.format in COLUMN_OF_FILES or not name.startswith("_"))


def _is_dataset(folder: str) -> bool:
    """Whether Penstock wrote what is in a folder: its manifest is JSON, but not data."""
    try:
        with os.fdopen(open_regular(Path(folder) / "manifest.json"), "rb") as file:
            return b'"format": "penstock"' in file.read(_MANIFEST_START)
    except (OSError, FormatError):
        return False


def _describe(path: str, class_name: str | None = None) -> SourceFile:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        if not os.path.islink(path):
            raise
        raise FileNotFoundError(
            f"{path}: a link to {os.readlink(path)}, which does not exist. Fetch that file, or remove the link."
        ) from None
    if not path.isascii():
        _check_name(path)
    name = os.path.basename(os.path.dirname(path)) if class_name is None else class_name
    return SourceFile(path, status.st_size, _identity(status), name)


def _check_name(path: str) -> None:
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{path!a}: the name is not UTF-8, and a dataset records the names of its sources. "
            "Rename it, for example with: convmv -f latin1 -t utf-8 --notest FILE."
        ) from None


def _identity(status: os.stat_result) -> str:
    return f"{status.st_size}-{status.st_mtime_ns}"


def _expand_folder(folder: str, options: SourceOptions, *, class_from: str) -> list[SourceFile]:
    if _is_dataset(folder):
        raise ValueError(f"{folder}: a dataset that Penstock wrote, not raw data. Give the folder of the raw files.")
    if os.path.exists(os.path.join(folder, "dataset_dict.json")):
        parts = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
        raise ValueError(
            f"{folder}: a dataset with the parts {', '.join(parts)}. Give one of them, as in {folder}/{parts[0]}."
        )
    if os.path.exists(state := os.path.join(folder, _STATE_NAME)) and options.format in (None, "arrow"):
        return list_local_files(_files_of_saved_dataset(folder, state))
    paths = sorted(path for path in _walk(folder, options, set()) if is_data_name(path, options))
    root = class_from.rstrip("/") + "/"
    return [_describe(path, first_folder(path.removeprefix(root))) for path in paths]


def _walk(
    folder: str,
    options: SourceOptions,
    seen: set[tuple[int, int]],
    takes: Callable[[str, SourceOptions], bool] = is_visible_name,
    takes_in_private: Callable[[str, SourceOptions], bool] | None = None,
) -> Iterator[str]:
    """Files in a folder and its subfolders whose names `takes` accepts, whatever format they suggest.

    Folders that begin with an underscore are passed over, unless `takes_in_private` says what to take from them.
    """
    status = os.stat(folder)
    if (status.st_dev, status.st_ino) in seen or _is_dataset(folder):  # a link that leads back up, or our own output
        return
    seen.add((status.st_dev, status.st_ino))
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                inside = takes if is_wanted_folder(entry.name, options) else takes_in_private
                if inside is not None:
                    yield from _walk(entry.path, options, seen, inside, takes_in_private)
            elif (entry.is_file() or entry.is_symlink()) and takes(entry.name, options):
                yield entry.path


def first_folder(relative: str) -> str:
    """First folder of a relative path, or ""."""
    return relative.split("/", 1)[0] if "/" in relative else ""


def _files_of_saved_dataset(folder: str, state_path: str) -> list[str]:
    """Arrow files of a Hugging Face dataset written by `save_to_disk`, in its order."""
    try:
        state: dict[str, Any] = json.loads(Path(state_path).read_bytes())
        names = [str(entry["filename"]) for entry in state["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{state_path}: not the state of a saved dataset ({error!r}).") from error
    for name in names:
        if os.path.basename(name) != name or name in (".", ".."):
            raise FormatError(f"{state_path}: {name!r} is outside the folder of the dataset.")
    return [os.path.join(folder, name) for name in names]

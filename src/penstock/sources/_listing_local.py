"""Which files of this machine a path, a folder or a glob means."""

from __future__ import annotations

import functools
import glob
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import FormatError
from penstock.filesystem import open_regular
from penstock.sources._model import SourceFile
from penstock.sources._options import COLUMN_OF_FILES, SourceOptions, is_data_name

_MANIFEST_START = 64
_STATE_NAME = "state.json"  # of a Hugging Face dataset
_NOT_DATA = ("readme", "license", "licence", "dataset_info", "dataset_infos", "dataset_dict", "state")


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

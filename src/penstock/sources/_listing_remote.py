"""Files of remote stores, by fsspec."""

from __future__ import annotations

import posixpath
from typing import Any

from penstock.sources._listing_local import first_folder, is_wanted_folder, is_wanted_name
from penstock.sources._model import SourceFile
from penstock.sources._options import SourceOptions
from penstock.sources._remote import RemoteStore

_VERSION_KEYS = ("ETag", "etag", "md5Hash", "crc32c", "generation", "LastModified", "Last-Modified", "mtime", "created")


def expand_remote(url: str, options: SourceOptions) -> list[SourceFile]:
    """Files of a URL, a remote folder or a glob."""
    store = RemoteStore(url, options)
    if _is_glob(url):
        found: dict[str, dict[str, Any]] = store.ask("glob", store.path, detail=True)
        return [_describe(store, info) for info in found.values() if info.get("type") != "directory"]
    try:
        info = store.info()
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{url}: no such file. Check the address.") from error
    if info.get("type") == "directory":
        return _expand_folder(store, options)
    return [_describe(store, {**info, "name": store.path})]


def _is_glob(url: str) -> bool:
    # "?" begins the query of a web address.
    return "*" in url if url.startswith("http") else any(mark in url for mark in "*?[")


def _expand_folder(store: RemoteStore, options: SourceOptions) -> list[SourceFile]:
    found: dict[str, dict[str, Any]] = store.ask("find", store.path, detail=True)
    root = store.path.rstrip("/") + "/"
    files = []
    for name, info in found.items():
        relative = name.removeprefix(root)
        if all(is_wanted_folder(part, options) for part in relative.split("/")[:-1]) and is_wanted_name(
            posixpath.basename(name), options
        ):
            files.append(_describe(store, info, first_folder(relative)))
    return files


def _describe(store: RemoteStore, info: dict[str, Any], class_name: str | None = None) -> SourceFile:
    path = str(store.filesystem.unstrip_protocol(info["name"]))
    size = info.get("size")
    num_bytes = -1 if size is None else int(size)
    version = next((str(info[key]) for key in _VERSION_KEYS if info.get(key)), "")
    folder = posixpath.basename(posixpath.dirname(path)) if class_name is None else class_name
    return SourceFile(path, num_bytes, f"{num_bytes}-{version}", folder, store.has_ranges(info["name"], info))

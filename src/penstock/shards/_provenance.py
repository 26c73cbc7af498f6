"""Where samples came from, in a file of its own: `provenance-*.json`.

A folder of a million images is a million source files, and of those who open a dataset hardly any asks for
them. So the manifest only names this file, with its size and checksum; it is read by who traces a sample
or prepares again. Who verifies checks it piece by piece, in little memory.
"""

from __future__ import annotations

import errno
import hashlib
import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import CorruptionError, FormatError, StorageError
from penstock.filesystem import PositionedFile
from penstock.shards._checksums import BLOCK_BYTES, checksum
from penstock.shards._manifest import FileEntry, Manifest
from penstock.shards._origins import are_sound


def pack_provenance(content: Mapping[str, Any]) -> tuple[FileEntry, bytes]:
    """The file, and what the manifest says of it."""
    data = json.dumps(dict(content), allow_nan=False).encode()
    digest = hashlib.blake2b(data, digest_size=8).hexdigest()
    return FileEntry(f"provenance-{digest}.json", len(data), checksum(data)), data


def read_provenance(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """What the file holds that the manifest names; nothing when it names none.

    Raises:
        CorruptionError: it differs from its checksum.
        FormatError: it is missing, is not JSON, or its origins cannot be followed.
        StorageError: it cannot be read, or does not fit into memory.
    """
    entry = manifest.provenance
    if entry is None:
        return {}
    file = _open(folder, entry)
    data = _read_all(file)
    _check(file, entry, checksum(data))
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{file.path}: not JSON ({type(error).__name__}: {error}).") from None
    if not isinstance(content, dict):
        raise FormatError(f"{file.path}: holds {reprlib.repr(content)}, not an object.")
    if not are_sound(content.get("origins", {"files": [], "splits": []})):
        raise FormatError(f"{file.path}: its origins of samples are not files and splits of them. Restore the file.")
    return content


def verify_provenance(folder: Path, entry: FileEntry) -> None:
    """Read every byte of the file, whatever they say.

    Raises:
        CorruptionError: it differs from its checksum.
        FormatError: it is missing.
    """
    file, found = _open(folder, entry), 0
    for begin in range(0, file.size, BLOCK_BYTES):
        found = checksum(file.read(begin, min(begin + BLOCK_BYTES, file.size)), found)
    _check(file, entry, found)


def _open(folder: Path, entry: FileEntry) -> PositionedFile:
    path = folder / entry.name
    try:
        file = PositionedFile(path)
    except FileNotFoundError:
        raise FormatError(
            f"{path}: the file is missing. Restore it to trace samples or to go on preparing; reading does not need it."
        ) from None
    if file.size != entry.num_bytes:
        raise CorruptionError(
            f"{path}: the file has {file.size:,} bytes and the manifest says {entry.num_bytes:,}. Restore it."
        )
    return file


def _read_all(file: PositionedFile) -> bytearray:
    try:
        data = bytearray(file.size)
    except MemoryError:
        raise StorageError(errno.ENOMEM, f"{file.path}: its {file.size:,} bytes do not fit into memory.") from None
    file.read_into(0, np.frombuffer(data, np.uint8))
    return data


def _check(file: PositionedFile, entry: FileEntry, found: int) -> None:
    if found != entry.checksum:
        raise CorruptionError(f"{file.path}: the file does not match its checksum. Restore it from a copy.")

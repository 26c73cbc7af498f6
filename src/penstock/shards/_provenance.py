"""Where samples came from, in a file of its own: `provenance-*.json`.

A folder of a million images is a million source files, and of those who open a dataset hardly any asks for
them. So the manifest only names this file, with its size and checksum; it is read by who traces a sample,
prepares again, or verifies.
"""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import CorruptionError, FormatError
from penstock.filesystem import PositionedFile
from penstock.shards._checksums import checksum
from penstock.shards._manifest import FileEntry, Manifest


def pack_provenance(content: Mapping[str, Any]) -> tuple[FileEntry, bytes]:
    """The file, and what the manifest says of it."""
    data = json.dumps(dict(content), allow_nan=False).encode()
    digest = hashlib.blake2b(data, digest_size=8).hexdigest()
    return FileEntry(f"provenance-{digest}.json", len(data), checksum(data)), data


def read_provenance(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """What the file holds that the manifest names; nothing when it names none.

    Raises:
        CorruptionError: it differs from its checksum.
        FormatError: it is missing, or is not JSON.
    """
    entry = manifest.provenance
    if entry is None:
        return {}
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
    data = file.read(0, file.size)
    if checksum(data) != entry.checksum:
        raise CorruptionError(f"{path}: the file does not match its checksum. Restore it from a copy.")
    try:
        content = json.loads(data.tobytes())
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: not JSON ({type(error).__name__}: {error}).") from None
    if not isinstance(content, dict):
        raise FormatError(f"{path}: holds {reprlib.repr(content)}, not an object.")
    return content

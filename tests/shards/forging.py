"""Files that a hostile or broken program could write: wrong contents under correct checksums."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import crc32c
import numpy as np
from numpy.typing import NDArray

import penstock
from penstock.errors import PenstockError

from .strategies import Written, files_of, random_samples, scratch, write

BLOCK_BYTES = 512 << 10

COLUMNS = {
    "tokens": "uint16[*]",
    "label": "int64",
    "pair": "float32[*,2]",
    "jpeg": "bytes",
    "half": "bfloat16[3]",
    "pictures": "bytes[*]",
}
SMALL = Written(
    COLUMNS,
    random_samples(
        COLUMNS,
        [5, 0, 3, 20, 1, 7, 7, 0, 11, 2, 9, 4],
        seed=11,
    ),
    700,
)


def write_small(path: Path) -> Path:
    """A dataset of six columns in a few shards: copies of files written once, because every write waits for a disk."""
    path.mkdir()
    for name, raw in _small_files().items():
        (path / name).write_bytes(raw)
    return path


@cache
def _small_files() -> dict[str, bytes]:
    with scratch() as folder:
        return files_of(write(folder / "ds", SMALL))


def sign_manifest(text: bytes) -> bytes:
    """`text`, an object without its closing brace, made a manifest whose checksum is right."""
    return text + f',\n "crc32c": "{crc32c.crc32c(text):08x}"\n}}\n'.encode()


def put_manifest(path: Path, fields: object) -> None:
    """Write a manifest of these fields."""
    (path / "manifest.json").write_bytes(sign_manifest(json.dumps(fields).encode()[:-1]))


def manifest_of(path: Path) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((path / "manifest.json").read_bytes())
    del fields["crc32c"]
    return fields


def forge_manifest(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the fields of a manifest and sign it again."""
    fields = manifest_of(path)
    change(fields)
    put_manifest(path, fields)


def header_of(shard: Path) -> tuple[dict[str, Any], bytes]:
    """(the header, the data behind it)."""
    raw = shard.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    return json.loads(raw[8:end]), raw[end:]


def pad_header(header: object) -> bytes:
    """A header as Penstock writes it, whatever it says."""
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    length = -(-(8 + len(text)) // 4096) * 4096 - 8
    return length.to_bytes(8, "little") + text.ljust(length)


def put_shard(path: Path, number: int, header: bytes, data: bytes) -> None:
    """Write a shard, header length included, and have the manifest agree with it."""
    fields = manifest_of(path)
    entry = fields["shards"][number]
    (path / entry["name"]).write_bytes(header + data)
    entry |= {"bytes": len(header) + len(data), "header_bytes": len(header)}
    entry["header_crc32c"] = f"{crc32c.crc32c(header):08x}"
    put_manifest(path, fields)


def forge_header(path: Path, change: Callable[[dict[str, Any]], object], *, number: int = 0) -> None:
    """Change the header of a shard; the checksums agree with it."""
    header, data = header_of(path / manifest_of(path)["shards"][number]["name"])
    change(header)
    put_shard(path, number, pad_header(header), data)


def forge_tensor(path: Path, name: str, values: NDArray[Any], *, number: int = 0) -> None:
    """Change the bytes of a tensor; the checksums agree with them."""
    header, data = header_of(path / manifest_of(path)["shards"][number]["name"])
    begin, end = header[name]["data_offsets"]
    assert values.nbytes == end - begin
    changed = data[:begin] + values.tobytes() + data[end:]
    tensors = [entry["data_offsets"] for key, entry in header.items() if key not in ("__metadata__", "__crc32c__")]
    sums = [
        crc32c.crc32c(changed[b:e][at : at + BLOCK_BYTES]) for b, e in tensors for at in range(0, e - b, BLOCK_BYTES)
    ]
    table = np.array(sums, "<u4").tobytes()
    begin, end = header["__crc32c__"]["data_offsets"]
    assert len(table) == end - begin
    header["__metadata__"]["checksums"] = f"{crc32c.crc32c(table):08x}"
    put_shard(path, number, pad_header(header), changed[:begin] + table + changed[end:])


def exercise(path: Path, *, io: Any, check: Any = "window") -> None:
    """Use a dataset in every way that reads it; only errors of Penstock may come out."""
    try:
        ds = penstock.open(path, io=io, check=check)
    except PenstockError:
        return
    few = [index for index in (0, 1, len(ds) // 2, len(ds) - 1) if 0 <= index < len(ds)]
    uses: list[Callable[[], Any]] = [lambda: ds.read(few), *(lambda index=index: ds[index] for index in few)]
    uses += [lambda name=name: ds.lengths(name) for name in ds.schema if ds.schema[name].is_ragged]
    for use in uses:
        message = error_of(use)
        assert message is None or str(path) in message


def error_of(use: Callable[[], object]) -> str | None:
    """What an error of Penstock says, if there is one; any other error is a bug."""
    try:
        use()
    except PenstockError as error:
        return str(error)
    return None

"""A reader of datasets written from `docs/format.md` alone: it imports nothing of Penstock."""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
from pathlib import Path
from typing import Any

import crc32c

BLOCK_BYTES = 512 << 10
ITEM_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "U32": 4, "I32": 4, "U64": 8, "I64": 8, "F16": 2}
ITEM_BYTES |= {"BF16": 2, "F32": 4, "F64": 8, "C64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}
ITEM_BYTES |= {"F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1}


def read_dataset(path: Path) -> dict[str, list[bytes]]:
    """Every sample of every column as its bytes; an assertion fails where the page is wrong."""
    manifest = read_manifest(path)
    samples: dict[str, list[bytes]] = {name: [] for name in manifest["columns"]}
    for entry in manifest["shards"]:
        tensors = read_shard(path / entry["name"], entry, manifest["columns"])
        for name, spec in manifest["columns"].items():
            samples[name] += split(tensors, name, spec, entry)
    assert all(len(column) == manifest["samples"] for column in samples.values())
    return samples


def read_manifest(path: Path) -> dict[str, Any]:
    raw = (path / "manifest.json").read_bytes()
    manifest: dict[str, Any] = json.loads(raw)
    assert (manifest["format"], manifest["version"]) == ("penstock", 1)
    assert raw[-26:] == f',\n "crc32c": "{hexadecimal(raw[:-26])}"\n}}\n'.encode()
    if "provenance" in manifest:
        entry = manifest["provenance"]
        content = (path / entry["name"]).read_bytes()
        assert (len(content), hexadecimal(content)) == (entry["bytes"], entry["crc32c"])
        assert entry["name"] == f"provenance-{hashlib.blake2b(content, digest_size=8).hexdigest()}.json"
    return manifest


def read_shard(path: Path, entry: dict[str, Any], columns: dict[str, str]) -> dict[str, tuple[list[int], bytes]]:
    """(shape, bytes) of each tensor."""
    raw = path.read_bytes()
    end = 8 + struct.unpack("<Q", raw[:8])[0]
    assert (len(raw), end, hexadecimal(raw[:end])) == (entry["bytes"], entry["header_bytes"], entry["header_crc32c"])
    assert end % 4096 == 0
    header = json.loads(raw[8:end])
    metadata = header.pop("__metadata__")
    stretches = [info["data_offsets"] for info in header.values()]
    assert [0, *(stop for _, stop in stretches)] == [*(start for start, _ in stretches), len(raw) - end]
    assert list(header) == in_file_order(header, columns)
    tensors = {
        name: (info["shape"], raw[end + info["data_offsets"][0] : end + info["data_offsets"][1]])
        for name, info in header.items()
    }
    _, table = tensors.pop("__crc32c__")
    blocks = [data[at : at + BLOCK_BYTES] for _, data in tensors.values() for at in range(0, len(data), BLOCK_BYTES)]
    assert table == struct.pack(f"<{len(blocks)}I", *map(crc32c.crc32c, blocks))
    assert metadata.keys() == {"format", "columns", "checksums"}
    assert (metadata["format"], metadata["checksums"]) == ("penstock", hexadecimal(table))
    assert list(json.loads(metadata["columns"]).items()) == list(columns.items())
    assert path.name.split("-")[2] == hashlib.blake2b(raw[:end] + table, digest_size=8).hexdigest() + ".safetensors"
    return tensors


def in_file_order(header: dict[str, Any], columns: dict[str, str]) -> list[str]:
    parts = [parts_of(name, spec) for name, spec in columns.items()]
    names = [*(name for part in parts for name in part), "__crc32c__"]
    return sorted(names, key=lambda name: -ITEM_BYTES[header[name]["dtype"]])


def parts_of(name: str, spec: str) -> list[str]:
    if spec == "bytes[*]":
        return [*parts_of(name, "bytes"), *parts_of(f"{name}.sizes", "int64[*]")]
    return [f"{name}.values", f"{name}.offsets"] if is_ragged(spec) else [name]


def split(tensors: dict[str, Any], name: str, spec: str, entry: dict[str, Any]) -> list[bytes]:
    """One column of a shard, sample by sample."""
    count = entry["samples"]
    if spec == "bytes[*]":
        return join(split(tensors, name, "bytes", entry), split(tensors, f"{name}.sizes", "int64[*]", entry))
    if not is_ragged(spec):
        shape, data = tensors[name]
        assert shape == [count, *sizes(spec)]
        width = len(data) // count
        return [data[place * width : (place + 1) * width] for place in range(count)]
    (total, *rest), data = tensors[f"{name}.values"]
    shape, offsets = tensors[f"{name}.offsets"]
    edges = struct.unpack(f"<{count + 1}q", offsets)
    assert (shape, rest, total) == ([count + 1], sizes(spec), entry["values"][name])
    assert (edges[0], edges[-1], sorted(edges)) == (0, total, list(edges))
    width = len(data) // total if total else 0
    return [data[begin * width : end * width] for begin, end in itertools.pairwise(edges)]


def join(samples: list[bytes], sizes: list[bytes]) -> list[bytes]:
    """Samples of several byte strings, the size of each before it."""
    joined = []
    for sample, packed in zip(samples, sizes, strict=True):
        numbers = struct.unpack(f"<{len(packed) // 8}q", packed)
        assert (sum(numbers), min(numbers, default=0) >= 0) == (len(sample), True)
        ends = itertools.accumulate(numbers)
        joined.append(
            b"".join(struct.pack("<q", n) + sample[end - n : end] for n, end in zip(numbers, ends, strict=True))
        )
    return joined


def is_ragged(spec: str) -> bool:
    return spec == "bytes" or "*" in spec


def sizes(spec: str) -> list[int]:
    inside = spec.partition("[")[2].rstrip("]").split(",")
    return [int(size) for size in inside if size not in ("", "*")]


def hexadecimal(data: bytes) -> str:
    return f"{crc32c.crc32c(data):08x}"

"""Small datasets to write, and everything there is to see in a folder afterwards."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

import penstock
from penstock.errors import IncompleteDataset
from penstock.shards import DatasetWriter, Workspace, pack_provenance, read_manifest
from penstock.shards import verify_folder as verify

COLUMNS = {"tokens": "uint16[*]", "label": "int64", "blob": "bytes"}
SHARD_BYTES = 400

Sample = tuple[list[int], int, bytes]


def make_samples(seed: int, count: int) -> list[Sample]:
    """`count` samples of about 100 bytes that no other seed gives."""
    rng = np.random.default_rng(seed)
    return [
        (rng.integers(0, 65536, rng.integers(0, 40)).tolist(), 1000 * seed + number, rng.bytes(rng.integers(0, 60)))
        for number in range(count)
    ]


def write(
    path: Path, samples: list[Sample], mode: Any = "create", *, columns: Any = COLUMNS, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write `samples` as a dataset, or to one."""
    with DatasetWriter(path, columns, mode=mode, shard_bytes=shard_bytes) as writer:
        for tokens, label, blob in samples:
            writer.write({"tokens": tokens, "label": label, "blob": blob})


def add_provenance(path: Path, content: dict[str, Any]) -> Path:
    """Note where the samples of the dataset at `path` came from, as `prepare` does, and give the file."""
    workspace = Workspace(path, "append")
    entry, data = pack_provenance(content)
    workspace.add_file(entry.name, [data])
    assert workspace.previous is not None
    workspace.commit(dataclasses.replace(workspace.previous, provenance=entry))
    return path / entry.name


def contents(path: Path, io: Any = "map") -> list[Sample] | None:
    """Every sample at `path` by the front door, all checksums looked at; None when no dataset is there."""
    try:
        dataset = penstock.open(path, io=io)
    except IncompleteDataset:
        return None
    verification = verify(path)
    assert verification.is_sound, verification.faults
    assert verification.num_samples == len(dataset)
    return samples_of(dataset)


def samples_of(dataset: Any) -> list[Sample]:
    """Every sample of an open dataset."""
    columns = dataset.read(np.arange(len(dataset)))
    labels = columns["label"].tolist()
    rows = zip(columns["tokens"], labels, columns["blob"], strict=True)
    return [(tokens.tolist(), label, blob) for tokens, label, blob in rows]


def assert_tidy(path: Path) -> None:
    """The folder holds the manifest and the shards it names, or nothing."""
    found = sorted(os.listdir(path))
    try:
        assert found == sorted(["manifest.json", *read_manifest(path).file_names])
    except IncompleteDataset:
        assert found == []


def assert_next_writer_tidies(path: Path, expected: list[Sample] | None) -> None:
    """The next writer to come finds `expected`, leaves it as it is, and removes all else, even if it gives up."""
    if path.exists():
        DatasetWriter(path, COLUMNS, mode="create" if expected is None else "append").abort()
        assert_tidy(path)
    assert contents(path) == expected


def files_of(path: Path) -> dict[str, bytes]:
    """Name and bytes of every file in a folder."""
    return {entry.name: Path(entry.path).read_bytes() for entry in os.scandir(path)}


def copy_folder(source: Path, target: Path) -> Path:
    """A fresh copy of a folder at `target`, or nothing there when there is no source."""
    shutil.rmtree(target, ignore_errors=True)
    if source.exists():
        shutil.copytree(source, target)
    return target

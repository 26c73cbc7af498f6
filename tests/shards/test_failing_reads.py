"""What a disk or server does not give is named with its path and the next step; so is what a writer took away."""

from __future__ import annotations

import dataclasses
import errno
import io
import os
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import DatasetChanged, FormatError, StorageError
from penstock.shards import Workspace
from penstock.shards import _manifest as manifest_module

from .forging import error_of, write_small


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_small(tmp_path / "ds")


class Failing(io.BytesIO):
    """A file whose reads fail."""

    def __init__(self, descriptor: int, number: int) -> None:
        super().__init__()
        self.descriptor = descriptor
        self.number = number

    def close(self) -> None:
        if not self.closed:
            os.close(self.descriptor)
        super().close()

    def read(self, *_: Any) -> bytes:
        raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize(("number", "advice"), [(errno.EIO, "Check the path and the disk"), (errno.ESTALE, "open the")])
@pytest.mark.parametrize("use", [penstock.open, penstock.verify])
def test_a_manifest_that_cannot_be_read_is_named_with_the_next_step(
    small: Path, monkeypatch: pytest.MonkeyPatch, use: Any, number: int, advice: str
) -> None:
    monkeypatch.setattr(manifest_module.os, "fdopen", lambda descriptor, _: Failing(descriptor, number))
    with pytest.raises(StorageError, match=rf"ds/manifest\.json: .* \(read\)\. .*{advice}"):
        use(small)


@pytest.mark.parametrize("called", ["fstat", "preadv"])
def test_a_shard_that_the_server_took_away_is_named_with_the_next_step(
    small: Path, monkeypatch: pytest.MonkeyPatch, called: str
) -> None:
    ds = penstock.open(small, io="pread")

    def refuse(*_: Any) -> Any:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patch:
        patch.setattr(os, called, refuse)
        message = error_of(lambda: ds[0]) or ""
    assert str(small / "shard-") in message
    assert "The server replaced or removed the file; open the dataset again" in message


def rewrite(path: Path) -> None:
    with penstock.DatasetWriter(path, {"x": "int64"}, mode="overwrite") as writer:
        writer.write({"x": 1})


def test_verifying_a_dataset_that_is_overwritten_meanwhile_says_so(small: Path) -> None:
    seen: list[int] = []

    def overwrite_once(done: int, total: int) -> None:
        if not seen:
            rewrite(small)
        seen.append(done)

    with pytest.raises(DatasetChanged, match=r"rewritten while it was being verified.* Verify it again"):
        penstock.verify(small, on_progress=overwrite_once)
    assert seen


def test_a_shard_that_is_just_missing_is_still_a_fault(small: Path) -> None:
    next(small.glob("shard-*")).unlink()
    assert [fault for fault in penstock.verify(small).faults if "the shard is missing" in fault]


def test_an_interrupt_after_the_commit_says_that_the_samples_are_there(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = len(penstock.open(small))
    writer = penstock.DatasetWriter(small, penstock.open(small).schema.to_json(), mode="append")
    writer.write(dict(penstock.open(small)[0]))
    monkeypatch.setattr("penstock.shards._workspace.remove_tree", interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        writer.close()
    assert "the new dataset is in place" in caught.value.__notes__[0]
    assert len(penstock.open(small)) == before + 1


def test_a_manifest_that_nobody_could_read_is_not_committed(small: Path) -> None:
    before = (small / "manifest.json").read_bytes()
    workspace = Workspace(small, "append")
    assert workspace.previous is not None
    shards = tuple(dataclasses.replace(shard, header_bytes=5) for shard in workspace.previous.shards)
    with pytest.raises(FormatError, match="has a header of 5 bytes"):
        workspace.commit(dataclasses.replace(workspace.previous, shards=shards))
    workspace.close()
    assert (small / "manifest.json").read_bytes() == before
    assert penstock.verify(small).is_sound

"""Files written past the page cache hold what was written, whatever the sizes and the file system."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import StorageError
from penstock.filesystem import _durable
from penstock.filesystem._durable import BUFFER_BYTES, NUM_BUFFERS, AlignedBuffers, DirectFile

SIZES = [0, 1, 4095, 4096, 4097, BUFFER_BYTES - 1, BUFFER_BYTES, BUFFER_BYTES + 1, 3 * BUFFER_BYTES + 5000]


def write(path: Path, pieces: list[bytes], buffers: AlignedBuffers) -> None:
    file = DirectFile(path, sum(map(len, pieces)), buffers)
    for piece in pieces:
        file.write(memoryview(piece))
    file.end()
    file.sync()


@pytest.mark.parametrize("size", SIZES)
def test_a_file_holds_its_pieces_in_order(tmp_path: Path, size: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    cut = size // 3
    write(tmp_path / "file", [data[:cut], b"", data[cut:]], AlignedBuffers())
    assert (tmp_path / "file").read_bytes() == data


def test_a_file_larger_than_all_blocks_takes_no_more_of_them(tmp_path: Path) -> None:
    blocks = AlignedBuffers()
    data = np.random.default_rng(0).bytes((NUM_BUFFERS + 3) * BUFFER_BYTES + 77)
    write(tmp_path / "file", [data], blocks)
    assert (tmp_path / "file").read_bytes() == data
    assert blocks._free.qsize() <= NUM_BUFFERS


@pytest.mark.parametrize("call", ["open", "write"])
def test_a_file_system_without_direct_writes_gets_ordinary_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    real = getattr(os, call)

    def refuse(first: Any, second: Any, *more: Any, **named: Any) -> Any:
        direct = second & os.O_DIRECT if call == "open" else _is_direct(first)
        if direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(first, second, *more, **named)

    data = np.random.default_rng(0).bytes(BUFFER_BYTES + 100)
    with monkeypatch.context() as patch:
        patch.setattr(_durable.os, call, refuse)
        write(tmp_path / "file", [data], AlignedBuffers())
    assert (tmp_path / "file").read_bytes() == data


def _is_direct(descriptor: int) -> bool:
    return bool(_durable.fcntl.fcntl(descriptor, _durable.fcntl.F_GETFL) & os.O_DIRECT)


def test_a_refused_write_is_told_with_path_and_bytes_and_no_block_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = AlignedBuffers()
    real, calls = os.write, []

    def refuse(descriptor: int, data: memoryview) -> int:
        calls.append(len(data))
        if len(calls) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(_durable.os, "write", refuse)
        with pytest.raises(StorageError, match=rf"file: No space .*wrote {2 * BUFFER_BYTES:,} of {9 * BUFFER_BYTES:,}"):
            write(tmp_path / "file", [bytes(9 * BUFFER_BYTES)], blocks)
    write(tmp_path / "other", [bytes(2 * NUM_BUFFERS * BUFFER_BYTES)], blocks)  # waits for ever if one is


def test_a_file_that_is_there_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(StorageError, match="created"):
        DirectFile(tmp_path / "file", 1, AlignedBuffers())
    assert (tmp_path / "file").read_bytes() == b"mine"


@pytest.mark.parametrize("umask", [0o002, 0o022, 0o077])
@pytest.mark.parametrize("has_direct_writes", [True, False])
def test_a_file_follows_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int, has_direct_writes: bool
) -> None:
    if not has_direct_writes:
        monkeypatch.setattr(_durable, "_DIRECT", 0)
    before = os.umask(umask)
    try:
        write(tmp_path / "file", [b"bytes"], AlignedBuffers())
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o666 & ~umask

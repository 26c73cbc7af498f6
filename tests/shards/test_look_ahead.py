"""Blocks checked ahead of a reader who goes in order: the same data, the same errors, nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.errors import CorruptionError, FormatError
from penstock.shards import ShardFolder, _blocks
from penstock.shards._blocks import CHECKSUM_AHEAD, ChecksumAhead
from penstock.shards._layout import BLOCK_BYTES, block_checksums, checksum, join_checksums
from penstock.shards._storage import READY, STATE

from .strategies import scratch, shard_paths

IOS = ("map", "pread")
ROW_BYTES = 64 << 10
NUM_BLOCKS = 66
NUM_ROWS = NUM_BLOCKS * BLOCK_BYTES // ROW_BYTES - 3  # the last block is short
STEP = 5  # rows of a read: they do not end with a block


@pytest.fixture(scope="module")
def long() -> Iterator[Path]:
    """One shard of 33 MiB whose row i holds the number i."""
    with scratch() as folder:
        with penstock.DatasetWriter(folder / "ds", {"x": f"uint8[{ROW_BYTES}]"}) as writer:
            rows = (np.arange(NUM_ROWS) % 251).astype(np.uint8)
            writer.write_batch({"x": np.repeat(rows, ROW_BYTES).reshape(NUM_ROWS, ROW_BYTES)})
        yield folder / "ds"


@pytest.fixture(scope="module")
def chain() -> Iterator[Path]:
    """The same rows in four shards."""
    with scratch() as folder:
        columns = {"x": f"uint8[{ROW_BYTES}]"}
        with penstock.DatasetWriter(folder / "ds", columns, shard_bytes=NUM_ROWS * ROW_BYTES // 4 + 4096) as writer:
            rows = (np.arange(NUM_ROWS) % 251).astype(np.uint8)
            writer.write_batch({"x": np.repeat(rows, ROW_BYTES).reshape(NUM_ROWS, ROW_BYTES)})
        assert len(shard_paths(folder / "ds")) > 3
        yield folder / "ds"


@pytest.fixture(autouse=True)
def two_cpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(_blocks, "_AHEAD", 16)  # several to a shard of 33 MiB
    CHECKSUM_AHEAD.stop()
    yield
    CHECKSUM_AHEAD.stop()


def is_thread_there() -> bool:
    return any(thread.name.startswith("penstock-look-ahead") for thread in threading.enumerate())


def read_in_order(ds: Any, begin: int = 0, end: int = NUM_ROWS) -> int:
    """Read rows a few at a time; the number of those that were right before an error came."""
    for first in range(begin, end, STEP):
        rows = np.arange(first, min(first + STEP, end))
        try:
            found = ds.read(rows)["x"]
        except CorruptionError:
            return first
        assert (found == (rows % 251)[:, None]).all()
    return end


@pytest.mark.parametrize("io", IOS)
def test_reading_in_order_is_checked_ahead_and_reads_the_same(io: Any, long: Path) -> None:
    assert read_in_order(penstock.open(long, io=io)) == NUM_ROWS
    assert is_thread_there()


@pytest.mark.parametrize("io", IOS)
@settings(max_examples=25, deadline=None)
@given(byte=st.integers(0, NUM_ROWS * ROW_BYTES - 1), bit=st.integers(0, 7))
def test_damage_comes_with_the_first_read_that_needs_it_and_no_sooner(io: Any, byte: int, bit: int, long: Path) -> None:
    with flipped(long, byte, bit):
        ds = penstock.open(long, io=io)
        block = byte // BLOCK_BYTES
        first_row = block * BLOCK_BYTES // ROW_BYTES
        assert read_in_order(ds) == first_row // STEP * STEP
        for _ in range(2):
            with pytest.raises(CorruptionError, match=rf"shard-.*block {block} of tensor 'x'"):
                ds.read([first_row])
        assert read_in_order(ds, min(first_row + BLOCK_BYTES // ROW_BYTES, NUM_ROWS)) == NUM_ROWS


def test_what_was_checked_ahead_is_not_checked_again(long: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ds = penstock.open(long, io="map")
    assert isinstance(ds.storage, ShardFolder)
    read_in_order(ds, 0, 150)  # into the third window
    assert CHECKSUM_AHEAD._job is not None
    CHECKSUM_AHEAD._job.result()
    flags = ds.storage.shards.open_shard(0).blocks.flags(ds.storage.shards.open_shard(0).layout.tensors["x"])
    ahead = int(np.flatnonzero(flags)[-1]) + 1
    assert ahead > 24
    checked: list[int] = []
    match = _blocks.ChecksumBlocks._match
    monkeypatch.setattr(
        _blocks.ChecksumBlocks, "_match", lambda self, *blocks: checked.append(blocks[1]) or match(self, *blocks)
    )
    read_in_order(ds, 150)
    assert min(checked) == ahead


def test_a_reader_of_several_shards_finds_all_of_them_checked(chain: Path) -> None:
    ds = penstock.open(chain, io="map")
    assert isinstance(ds.storage, ShardFolder)
    assert read_in_order(ds) == NUM_ROWS
    for number in range(len(ds.storage.manifest.shards)):
        assert ds.storage.shards.open_shard(number).is_checked(ds.schema["x"])
        assert ds.storage.shards.table.rows[number, ds.storage.shards.slots["x"] + STATE] == READY


@pytest.mark.parametrize("io", IOS)
def test_a_next_shard_that_is_gone_is_told_to_who_reads_there(io: Any, chain: Path) -> None:
    ds = penstock.open(chain, io=io)
    assert isinstance(ds.storage, ShardFolder)
    second = int(ds.storage.starts[1])
    shard = chain / ds.storage.manifest.shards[1].name
    shard.rename(chain / "away")
    try:
        assert read_in_order(ds, 0, second) == second
        with pytest.raises(FormatError, match="missing"):
            ds.read([second])
    finally:
        (chain / "away").rename(shard)
    assert read_in_order(ds, second) == NUM_ROWS


def test_when_all_was_read_all_is_known_to_be_checked(long: Path) -> None:
    ds = penstock.open(long)
    read_in_order(ds)
    assert isinstance(ds.storage, ShardFolder)
    assert ds.storage.shards.open_shard(0).is_checked(ds.schema["x"])


def test_whoever_reads_here_and_there_or_little_starts_no_thread(long: Path) -> None:
    ds = penstock.open(long)
    read_in_order(ds, 0, 20)
    for row in (300, 77, 500, 150, 404, 222):
        assert (ds.read([row])["x"] == row % 251).all()
    assert not is_thread_there()


def test_a_process_with_one_cpu_checks_for_itself(long: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1})
    assert read_in_order(penstock.open(long)) == NUM_ROWS
    assert not is_thread_there()


@pytest.mark.parametrize("io", IOS)
def test_many_readers_in_order_read_right(io: Any, long: Path) -> None:
    shared = penstock.open(long, io=io)
    with ThreadPoolExecutor(4) as pool:
        done = pool.map(read_in_order, [shared, shared, penstock.open(long, io=io), penstock.open(long, io=io)])
        assert list(done) == [NUM_ROWS] * 4


def test_a_shard_closed_meanwhile_is_read_on(long: Path) -> None:
    ds = penstock.open(long)
    assert isinstance(ds.storage, ShardFolder)
    for first in range(0, NUM_ROWS, 45):
        read_in_order(ds, first, min(first + 45, NUM_ROWS))
        ds.storage.shards.close_shards({0})


def test_a_forked_child_and_its_parent_both_read_on(long: Path) -> None:
    ds = penstock.open(long)
    read_in_order(ds, 0, 200)
    child = os.fork()
    if child == 0:
        os._exit(0 if read_in_order(ds, 200) == NUM_ROWS and is_thread_there() else 1)
    assert read_in_order(ds, 200) == NUM_ROWS
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_thread_is_gone_before_a_fork(long: Path) -> None:
    ds = penstock.open(long)
    read_in_order(ds, 0, 200)
    assert is_thread_there()
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert not is_thread_there()


EXIT = """
    import atexit, os, sys, numpy as np, penstock
    os.sched_getaffinity = lambda _: {0, 1}
    ds = penstock.open(sys.argv[1])
    read = lambda begin, end: [ds.read([row]) for row in range(begin, end)]
    atexit.register(lambda: (read(200, len(ds)), print("read on")))
    read(0, 200)
"""


def test_python_exits_in_the_middle_and_reads_on_while_it_does(long: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(EXIT), str(long)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "read on\n", "")


def test_one_job_at_a_time() -> None:
    look_ahead, gate = ChecksumAhead(), threading.Event()
    try:
        assert look_ahead.start(gate.wait)
        assert not look_ahead.start(gate.wait)
        gate.set()
        assert look_ahead._job is not None
        assert look_ahead._job.result()
        assert look_ahead.start(gate.wait)
    finally:
        gate.set()
        look_ahead.stop()


@settings(max_examples=20)
@given(blocks=st.lists(st.binary(min_size=1, max_size=9), max_size=6))
def test_checksums_of_blocks_join_into_that_of_all(blocks: list[bytes]) -> None:
    data = np.zeros(len(blocks) * BLOCK_BYTES, np.uint8)
    for place, block in enumerate(blocks):
        data[place * BLOCK_BYTES + 100 :][: len(block)] = np.frombuffer(block, np.uint8)
    assert join_checksums(block_checksums(data).tolist()) == checksum(data)


@contextmanager
def flipped(path: Path, byte: int, bit: int) -> Iterator[None]:
    """The only shard with a bit of its values flipped, for a while."""
    (shard,) = shard_paths(path)
    place = shard.stat().st_size - NUM_ROWS * ROW_BYTES + byte
    with open(shard, "r+b") as file:
        (whole,) = os.pread(file.fileno(), 1, place)
        os.pwrite(file.fileno(), bytes([whole ^ 1 << bit]), place)
        try:
            yield
        finally:
            os.pwrite(file.fileno(), bytes([whole]), place)

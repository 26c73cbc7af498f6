"""`drop_consumed=True`: what was read leaves the page cache, and no batch is another for it."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock

ROW_BYTES = 64 << 10
NUM_ROWS = 384  # 24 MiB: six storage windows


def resident_share(path: Path) -> float:
    """Share of a file's pages that are in the page cache."""
    size = path.stat().st_size
    with open(path, "rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as view:
        pages = np.frombuffer(view, np.uint8)
        states = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        address = ctypes.c_void_p(pages.ctypes.data)
        assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(size), ctypes.c_void_p(states.ctypes.data)) == 0
        del pages
        return float((states & 1).mean())


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    rows = np.repeat(np.arange(NUM_ROWS, dtype=np.uint8), ROW_BYTES).reshape(NUM_ROWS, ROW_BYTES)
    with penstock.DatasetWriter(tmp_path / "data", {"x": f"uint8[{ROW_BYTES}]"}) as writer:
        writer.write_batch({"x": rows})
    (path,) = (tmp_path / "data").glob("shard-*")
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    if resident_share(path) > 0.1:
        pytest.skip("this file system has no page cache that can be dropped")
    return path


@pytest.mark.parametrize("io", ["map", "pread"])
@pytest.mark.parametrize(
    "options",
    [{"workers": "inline"}, {"workers": "thread", "num_workers": 1}, {"workers": "process", "num_workers": 1}],
    ids=["inline", "thread", "process"],
)
def test_what_was_read_leaves_the_page_cache_if_asked_to(shard: Path, options: Any, io: Any) -> None:
    plan = penstock.open(shard.parent, io=io).shuffle(seed=1, group=1).batch(8)
    unmapped = penstock.open(shard.parent, io="pread").shuffle(seed=1, group=1).batch(8)
    kept = [batch["x"][:, 0].tolist() for batch in penstock.DataLoader(unmapped, workers="inline")]
    assert resident_share(shard) > 0.9
    with penstock.DataLoader(plan, drop_consumed=True, **options) as loader:
        assert [batch["x"][:, 0].tolist() for batch in loader] == kept
    assert resident_share(shard) < 0.9  # what shares a large page with the last window stays, or was read ahead

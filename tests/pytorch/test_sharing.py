"""What a dataset shares with the trainer is shared with its workers too, and a memory map stays a map."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader

import penstock
from pytorch.torch_examples import Numbers

pytestmark = pytest.mark.usefixtures("lasting_fork_servers")
METHODS = ["spawn", "forkserver"]


class Sharing(Numbers):
    """Whatever multiprocessing shares, written to by workers."""

    def __init__(self, method: str) -> None:
        super().__init__(8)
        context: Any = multiprocessing.get_context(method)
        self.counter = context.Value("i", 0)
        self.array = context.Array("d", 8)
        self.lock = context.Lock()
        self.event = context.Event()
        self.queue = context.Queue()
        self.reader, self.writer = context.Pipe(duplex=False)
        self.seen = torch.zeros(8, dtype=torch.int64).share_memory_()
        self.views = self.seen[::2], self.seen[1::2]
        self.private = torch.zeros(8)

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.counter.get_lock():
            self.counter.value += 1
        with self.lock:
            self.array[index] += index
        self.views[index % 2][index // 2] += 10 + index
        self.private += 1
        self.queue.put(index)
        self.event.set()
        return self.private.max()


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.stress), "forkserver"])
def test_what_multiprocessing_shares_is_shared_with_workers(method: str) -> None:
    dataset = Sharing(method)
    loader = penstock.DataLoader(dataset, num_workers=2, multiprocessing_context=method)
    assert sum(len(batch) for batch in loader) == 8
    assert dataset.counter.value == 8
    assert list(dataset.array) == list(range(8))
    assert dataset.seen.tolist() == [10 + index for index in range(8)]
    assert dataset.event.is_set()
    assert sorted(dataset.queue.get(timeout=30) for _ in range(8)) == list(range(8))
    assert not dataset.private.any()


def test_a_counter_is_shared_as_torch_shares_it() -> None:
    counts = []
    for loader, method in ((penstock.DataLoader, "forkserver"), (TorchDataLoader, "spawn")):
        dataset = Sharing(method)
        list(loader(dataset, num_workers=1, multiprocessing_context=method))
        counts.append((dataset.counter.value, dataset.seen.tolist()))
    assert counts[0] == counts[1]


class Segment(Numbers):
    """A named segment."""

    def __init__(self, segment: shared_memory.SharedMemory) -> None:
        super().__init__(4)
        self.segment = segment

    def __getitem__(self, index: int) -> torch.Tensor:
        self.segment.buf[index] = index + 1
        return torch.tensor(index)


def test_a_named_segment_survives_the_workers_that_used_it() -> None:
    segment = shared_memory.SharedMemory(create=True, size=4)
    try:
        for _ in range(2):
            list(penstock.DataLoader(Segment(segment), num_workers=1, multiprocessing_context="forkserver"))
            assert bytes(segment.buf[:4]) == bytes([1, 2, 3, 4])
            segment.buf[:4] = bytes(4)
    finally:
        segment.close()
        segment.unlink()


class Locking(Numbers):
    """Holds the lock most of the time."""

    def __init__(self, lock: Any) -> None:
        super().__init__(10_000)
        self.lock = lock

    def __getitem__(self, index: int) -> torch.Tensor:
        import time

        with self.lock:
            time.sleep(0.02)
        return torch.tensor(index)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_worker_that_is_no_longer_wanted_gives_its_lock_back(method: str) -> None:
    lock = multiprocessing.get_context(method).Lock()
    for _ in range(3):
        next(iter(penstock.DataLoader(Locking(lock), num_workers=1, multiprocessing_context=method)))
        assert lock.acquire(timeout=30)
        lock.release()


def test_hundreds_of_shared_tensors_are_sent() -> None:
    class_of = Many([torch.full((1,), float(index)).share_memory_() for index in range(300)])
    (batch,) = penstock.DataLoader(class_of, batch_size=300, num_workers=1, multiprocessing_context="forkserver")
    assert batch.flatten().tolist() == list(range(300))


class Many(Numbers):
    """A list of tensors."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__(len(tensors))
        self.tensors = tensors

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.tensors[index]


class Mapped(Numbers):
    """Rows of an array, and where this process has them from."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        super().__init__(len(array))
        self.array = array

    def __getitem__(self, index: int) -> Any:
        return self.array[index].copy(), os.path.realpath("/proc/self/exe"), mapped_files()


def mapped_files() -> str:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return "\n".join(line.split(maxsplit=5)[-1] for line in lines if line.endswith(".dat"))


def make_map(folder: Path, mode: Any = "r") -> np.memmap[Any, Any]:
    path = folder / "numbers.dat"
    np.arange(4000, dtype=np.float32).tofile(path)
    return np.memmap(path, np.float32, mode, shape=(400, 10))


VIEWS = {
    "all of it": lambda array: array,
    "a slice": lambda array: array[20:50],
    "a column": lambda array: array[:, 3:5],
    "backwards": lambda array: array[::-2],
    "a view": lambda array: array.view(np.ndarray)[7:],
    "other numbers": lambda array: array.view(np.int16)[1:],
}


@pytest.mark.parametrize(
    "view",
    [
        name if name in ("a column", "backwards", "a view") else pytest.param(name, marks=pytest.mark.stress)
        for name in VIEWS
    ],
)
def test_a_map_is_sent_as_a_map(view: str, tmp_path: Path) -> None:
    array = VIEWS[view](make_map(tmp_path))
    rows, _, files = zip(
        *penstock.DataLoader(Mapped(array), batch_size=None, num_workers=1, multiprocessing_context="forkserver"),
        strict=True,
    )
    assert np.array_equal(np.stack(rows), array)
    assert set(files) == {str(tmp_path / "numbers.dat")}


def test_what_a_worker_writes_into_a_shared_map_is_in_the_file(tmp_path: Path) -> None:
    array = make_map(tmp_path, "r+")
    list(penstock.DataLoader(Writing(array), num_workers=1, multiprocessing_context="forkserver"))
    assert (array[:, 0] == -1).all()


class Writing(Mapped):
    """Writes."""

    def __getitem__(self, index: int) -> int:
        self.array[index, 0] = -1
        return index


@pytest.mark.parametrize(
    "trouble",
    [
        "the file is gone",
        *(
            pytest.param(trouble, marks=pytest.mark.stress)
            for trouble in ("not the one that was mapped", "private map was written to")
        ),
    ],
)
def test_a_map_that_cannot_be_mapped_again_is_copied_with_a_word(trouble: str, tmp_path: Path) -> None:
    array = make_map(tmp_path, "c")
    if "private" in trouble:
        array[3] = 7
    else:
        os.remove(tmp_path / "numbers.dat")
    if "not the one" in trouble:
        np.zeros(4000, np.float32).tofile(tmp_path / "numbers.dat")
    expected = array.copy()
    with pytest.warns(UserWarning, match=rf"numbers\.dat: .*{trouble}.*a copy .*16,000 bytes"):
        loader = iter(
            penstock.DataLoader(Mapped(array), batch_size=None, num_workers=1, multiprocessing_context="forkserver")
        )
    assert np.array_equal(np.stack([row for row, *_ in loader]), expected)


def keep_row(row: dict[str, Any]) -> dict[str, Any]:
    return {"x": row["x"], "is_mapped": bool(mapped_files())}


def test_a_plan_over_a_map_maps_it_in_its_workers(tmp_path: Path) -> None:
    plan = penstock.from_arrays({"x": make_map(tmp_path)}).map(keep_row).batch(100)
    with penstock.DataLoader(plan, workers="process", num_workers=1) as loader:
        batches = list(loader)
    assert all(batch["is_mapped"].all() for batch in batches)
    assert torch.equal(torch.cat([batch["x"] for batch in batches]).flatten(), torch.arange(4000.0))

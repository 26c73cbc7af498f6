"""Torch datasets to load, and torch's own loader to compare with."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import penstock


class Numbers(Dataset[torch.Tensor]):
    """Sample i is i."""

    def __init__(self, length: int = 20) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class Augmented(Numbers):
    """Every global generator, every sort of value, and who computed it."""

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        return {
            "index": torch.full((3,), index),
            "draws": (torch.rand(2), np.random.rand(3), random.random()),
            "worker": (-1, 0) if info is None else (info.id, info.seed),
            "name": f"sample {index}",
        }


class Rows(Numbers):
    """Batches of samples at once."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [torch.tensor([index, len(indices)]) for index in indices]


class Failing(Numbers):
    """Sample 7 raises what `error` makes."""

    def __init__(self, error: Callable[[], BaseException]) -> None:
        super().__init__(12)
        self.error = error

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 7:
            raise self.error()
        return super().__getitem__(index)


class Slow(Numbers):
    """Sample 5 takes long."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            time.sleep(60)
        return super().__getitem__(index)


class Killing(Numbers):
    """Sample 5 kills its worker."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            os.kill(os.getpid(), 9)
        return super().__getitem__(index)


class WhereAmI(Numbers):
    """The process that computes."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, os.getpid()])


class Split(IterableDataset[torch.Tensor]):
    """Numbers, shared out between workers; worker w has (w + 1) times its share."""

    def __init__(self, length: int = 23) -> None:
        self.length = length

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(worker, self.length * (worker + 1), num_workers):
            yield torch.tensor([index, worker, random.randint(0, 999)])


class Repeated(IterableDataset[int]):
    """Numbers; knows nothing of workers."""

    def __init__(self, length: int = 8) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))

    def __len__(self) -> int:
        return self.length


class CountingIterator:
    """Counts, and can say where it is."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers, self.place = numbers, 0

    def __iter__(self) -> CountingIterator:
        return self

    def __next__(self) -> int:
        if self.place == len(self.numbers):
            raise StopIteration
        self.place += 1
        return self.numbers[self.place - 1]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def share(length: int) -> list[int]:
    info = get_worker_info()
    worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
    return list(range(worker, length, num_workers))


class StatefulIterator(IterableDataset[int]):
    """Whose iterator has a state."""

    def __init__(self, length: int = 23) -> None:
        self.length = length

    def __iter__(self) -> CountingIterator:
        return CountingIterator(share(self.length))


class StatefulDataset(IterableDataset[int]):
    """Which has a state itself, as torchdata's examples do."""

    def __init__(self, length: int = 23) -> None:
        self.length, self.place = length, 0
        self.is_resumed = False

    def __iter__(self) -> Iterator[int]:
        if not self.is_resumed:
            self.place = 0
        self.is_resumed = False
        numbers = share(self.length)
        while self.place < len(numbers):
            self.place += 1
            yield numbers[self.place - 1]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place, self.is_resumed = state["place"], True


class Point(NamedTuple):
    """A named tuple in a sample."""

    x: Any
    y: Any


def assert_same(ours: Any, torchs: Any) -> None:
    """Equal in type, dtype, shape, strides and value, all the way down."""
    assert type(ours) is type(torchs)
    if isinstance(ours, torch.Tensor):
        assert (ours.dtype, ours.shape, ours.stride()) == (torchs.dtype, torchs.shape, torchs.stride())
        assert torch.equal(ours, torchs) or (ours.isnan() == torchs.isnan()).all()
    elif isinstance(ours, np.ndarray):
        assert ours.dtype == torchs.dtype
        assert np.array_equal(ours, torchs)
    elif isinstance(ours, dict):
        assert list(ours) == list(torchs)
        for key in ours:
            assert_same(ours[key], torchs[key])
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(torchs)
        for one, other in zip(ours, torchs, strict=True):
            assert_same(one, other)
    else:
        assert ours == torchs


def seed_everything() -> None:
    torch.manual_seed(3)
    np.random.seed(1)
    random.seed(2)


def both(make: Callable[[Any], Any]) -> tuple[Any, Any]:
    """What `make` returns with our loader and with torch's, from the same seeds."""
    results = []
    for loader in (penstock.DataLoader, TorchDataLoader):
        seed_everything()
        results.append(make(loader))
    return results[0], results[1]


def plain(batches: Any) -> list[Any]:
    return [batch.tolist() for batch in batches]

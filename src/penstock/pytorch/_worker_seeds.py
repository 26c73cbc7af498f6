"""What torch sets up in a worker before the first sample: seeds of all global generators, and who it is."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import worker as torch_worker


class WatchedWorkerInfo(torch_worker.WorkerInfo):
    """`torch.utils.data.get_worker_info()`, which remembers whether anybody asked for anything in it."""

    __slots__ = ()
    was_read = False

    def __getattribute__(self, name: str) -> Any:
        WatchedWorkerInfo.was_read = True
        return super().__getattribute__(name)


def seed_worker(base_seed: int, worker: int) -> None:
    """Seed python's, torch's and numpy's global generators as torch does."""
    random.seed(base_seed + worker)
    torch.manual_seed(base_seed + worker)
    np.random.seed(torch_worker._generate_state(base_seed, worker))  # type: ignore[no-untyped-call]


def set_worker_info(worker: int, num_workers: int, seed: int, dataset: Any) -> None:
    """Let `get_worker_info()` answer in this process."""
    torch_worker._worker_info = WatchedWorkerInfo(id=worker, num_workers=num_workers, seed=seed, dataset=dataset)
    WatchedWorkerInfo.was_read = False

"""Ill: random reads of a memory map that is not in memory."""

import json
import mmap
import os
import tempfile
import time

import numpy as np
from torch.utils.data import DataLoader, Dataset

OPTIONS = {"batch_size": 16, "shuffle": True, "num_workers": 1} | json.loads(os.environ.get("FIX", "{}"))
IN_MEMORY = OPTIONS.pop("fix", False)
FOLDER = os.environ.get("DATA", tempfile.gettempdir())
ROW, ROWS = 16_384, 65_536


class Rows(Dataset):
    def __init__(self, path):
        self.rows = np.memmap(path, np.int32, "r", shape=(ROWS, ROW // 4))
        self.rows._mmap.madvise(mmap.MADV_RANDOM)  # no read-ahead: what is next to a row is not needed next
        if IN_MEMORY:
            self.rows = np.array(self.rows)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index] + 1


def prepare(path):
    """A file that no page of is in memory; a disk with a cache of its own has read it, so that all runs are alike."""
    if not os.path.exists(path):
        with open(path + ".part", "wb") as file:
            for _ in range(ROWS // 256):
                file.write(np.random.default_rng(0).bytes(256 * ROW))
            file.flush()
            os.fsync(file.fileno())
        os.rename(path + ".part", path)
    with open(path, "rb") as file:
        while file.read(16 << 20):
            pass
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


dataset = Rows(prepare(os.path.join(FOLDER, "penstock-cold-reads.bin")))
for _epoch in range(1_000):
    for _batch in DataLoader(dataset, **OPTIONS):
        time.sleep(0.002)  # the accelerator computes

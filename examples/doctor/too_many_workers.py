"""Ill: sixteen workers on a few cores, each decompressing every chunk for itself."""

import functools
import json
import os
import time
import zlib

import numpy as np
from torch.utils.data import DataLoader, Dataset

OPTIONS = {"batch_size": 16, "num_workers": 16} | json.loads(os.environ.get("FIX", "{}"))
SAMPLES_PER_CHUNK = 64
CHUNK = zlib.compress(np.random.default_rng(0).integers(0, 16, 6_000_000, np.uint8).tobytes(), 1)


class Chunked(Dataset):
    """Samples in compressed chunks, as HDF5 and Zarr store them; a worker keeps the last chunk it read."""

    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        chunk, place = divmod(index, SAMPLES_PER_CHUNK)
        return self.read(chunk)[place * 1000 : place * 1000 + 1000].copy()

    @staticmethod
    @functools.lru_cache(maxsize=1)
    def read(chunk):
        return np.frombuffer(zlib.decompress(CHUNK), np.uint8)


for _batch in DataLoader(Chunked(), **OPTIONS):
    time.sleep(0.005)  # the accelerator computes

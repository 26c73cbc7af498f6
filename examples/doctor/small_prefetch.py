"""Ill: every sixteenth batch takes long, and only two batches are prefetched to ride over it."""

import json
import os
import time

import torch
from torch.utils.data import DataLoader, Dataset

OPTIONS = {"batch_size": 8, "num_workers": 2, "prefetch_factor": 1} | json.loads(os.environ.get("FIX", "{}"))


class Bursty(Dataset):
    """Files of 128 samples, the first eight of which wait until the file is open."""

    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        time.sleep(0.024 if index % 128 < 8 else 0.0002)
        return torch.full((256,), index)


for _batch in DataLoader(Bursty(), **OPTIONS):
    time.sleep(0.015)  # the accelerator computes

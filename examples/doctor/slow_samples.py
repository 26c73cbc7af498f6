"""Ill: one sample in a hundred takes 0.3 s, and the batches behind it wait."""

import json
import os
import time

import torch
from torch.utils.data import DataLoader, Dataset

OPTIONS = {"batch_size": 8, "num_workers": 4} | json.loads(os.environ.get("FIX", "{}"))


class MostlyQuick(Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        time.sleep(0.3 if index % 100 == 37 else 0.0005)
        return torch.full((256,), index)


for _batch in DataLoader(MostlyQuick(), **OPTIONS):
    time.sleep(0.015)  # the accelerator computes

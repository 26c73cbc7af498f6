"""Ill: epochs of ten steps, and workers that are started anew for each."""

import json
import os
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

OPTIONS = {"batch_size": 16, "shuffle": True, "num_workers": 2} | json.loads(os.environ.get("FIX", "{}"))

loader = DataLoader(TensorDataset(torch.randn(160, 8)), **OPTIONS)
for _epoch in range(100_000):
    for (_batch,) in loader:
        time.sleep(0.010)  # the accelerator computes

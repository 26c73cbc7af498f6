"""Ill: a batch of 33, of which a kernel that works in tiles of 32 rows computes 64."""

import json
import os

import torch
from torch.utils.data import DataLoader, TensorDataset

OPTIONS = {"batch_size": 33, "num_workers": 1} | json.loads(os.environ.get("FIX", "{}"))
TILE = 32
torch.set_num_threads(1)

weights = torch.randn(2048, 2048)
for (rows,) in DataLoader(TensorDataset(torch.randn(1_000, 2048)), sampler=[*range(1_000)] * 1_000, **OPTIONS):
    tiles = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % TILE))  # what matmuls of accelerators do inside
    for _ in range(4):
        tiles = torch.tanh(tiles @ weights)

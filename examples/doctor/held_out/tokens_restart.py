"""Ill: a small token dataset, passed over many times, with a new worker for each pass."""

import json
import os

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

OPTIONS = {"batch_size": 4, "shuffle": True, "num_workers": 1} | json.loads(os.environ.get("FIX", "{}"))
torch.set_num_threads(1)


class Windows(Dataset):
    def __init__(self):
        self.tokens = np.random.default_rng(0).integers(0, 500, 65 * 48, np.uint16)

    def __len__(self):
        return 48

    def __getitem__(self, index):
        window = torch.from_numpy(self.tokens[65 * index : 65 * index + 65].astype(np.int64))
        return window[:-1], window[1:]


if __name__ == "__main__":
    model = torch.nn.Sequential(torch.nn.Embedding(500, 128), torch.nn.Linear(128, 256), torch.nn.Linear(256, 500))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader = DataLoader(Windows(), **OPTIONS)
    for _epoch in range(5_000):
        for inputs, targets in loader:
            torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()

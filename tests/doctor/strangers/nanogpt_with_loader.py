"""The same loop by someone who put the windows into a dataset, and draws from its loader without end."""

import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

block_size, batch_size = 32, 4


class Windows(Dataset):
    def __init__(self, path):
        self.data = np.memmap(path, dtype=np.uint16, mode="r")

    def __len__(self):
        return (len(self.data) - 1) // block_size

    def __getitem__(self, index):
        time.sleep(0.002)
        window = torch.from_numpy(self.data[index * block_size : (index + 1) * block_size + 1].astype(np.int64))
        return window[:-1], window[1:]


def cycle(loader):
    while True:
        yield from loader


def main():
    np.random.default_rng(1337).integers(0, 64, 100_000, np.uint16).tofile("train.bin")
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    batches = cycle(DataLoader(Windows("train.bin"), batch_size=batch_size, shuffle=True))
    X, Y = next(batches)
    for _iter_num in range(600_000):
        with torch.autocast("cpu", enabled=False):
            loss = F.cross_entropy(model(X).view(-1, 64), Y.view(-1))
        X, Y = next(batches)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)


main()

"""Healthy: an accelerator computes, and two workers are always ahead of it."""

import time

import torch
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        time.sleep(0.0005)
        return torch.full((3, 32, 32), float(index))


for _images in DataLoader(Images(), batch_size=16, shuffle=True, num_workers=2, prefetch_factor=4):
    time.sleep(0.030)  # the accelerator computes

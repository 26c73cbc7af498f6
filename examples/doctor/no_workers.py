"""Ill: a slow transform, and no workers to run it beside the training loop."""

import json
import os
import time

import torch
from torch.utils.data import DataLoader, Dataset

OPTIONS = {"batch_size": 16, "shuffle": True, "num_workers": 0} | json.loads(os.environ.get("FIX", "{}"))


class Augmented(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        image = torch.arange(3 * 64 * 64, dtype=torch.float32).add_(index).view(3, 64, 64)
        time.sleep(0.0015)  # an image is fetched
        return image.flip(-1).mul(1 / 255)


for _images in DataLoader(Augmented(), **OPTIONS):
    time.sleep(0.012)  # the accelerator computes

"""Ill: large tensors cross from the workers in shared memory that is made, mapped and thrown away for each."""

import json
import os
import time

import torch

if json.loads(os.environ.get("FIX", "{}")):
    from penstock import DataLoader
else:
    from torch.utils.data import DataLoader

IMAGES = torch.rand(64, 3, 224, 224)


class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        return IMAGES[index % 64]


if __name__ == "__main__":
    for _images in DataLoader(Images(), batch_size=64, num_workers=1):
        time.sleep(0.004)  # the accelerator computes

"""Ill: JPEGs are decoded and cropped in the training loop itself."""

import io
import json
import os
import time

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

OPTIONS = {"batch_size": 12, "shuffle": True, "num_workers": 0} | json.loads(os.environ.get("FIX", "{}"))


def photograph(seed):
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 255, (12, 16, 3), np.uint8))
    file = io.BytesIO()
    coarse.resize((400, 300), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


class Photographs(Dataset):
    def __init__(self):
        self.files = [photograph(seed) for seed in range(64)]

    def __len__(self):
        return 50_000

    def __getitem__(self, index):
        image = Image.open(io.BytesIO(self.files[index % 64])).convert("RGB")
        left, top = np.random.randint(0, 100, 2)
        pixels = np.asarray(image.crop((left, top, left + 200, top + 200)).resize((160, 160)))
        return torch.from_numpy(pixels.transpose(2, 0, 1) / np.float32(255)), index % 10


if __name__ == "__main__":
    for _images, _labels in DataLoader(Photographs(), **OPTIONS):
        time.sleep(0.040)  # the accelerator computes

"""Healthy: two workers decode JPEGs faster than the accelerator takes them."""

import time

from images_inline import Photographs
from torch.utils.data import DataLoader

if __name__ == "__main__":
    loader = DataLoader(Photographs(), batch_size=6, shuffle=True, num_workers=2, prefetch_factor=4)
    for _epoch in range(10):
        for _images, _labels in loader:
            time.sleep(0.090)  # the accelerator computes

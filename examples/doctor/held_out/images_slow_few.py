"""Ill: one photograph in seventy is fetched from far away."""

import json
import os
import time

from images_inline import Photographs
from torch.utils.data import DataLoader

OPTIONS = {"batch_size": 4, "num_workers": 2} | json.loads(os.environ.get("FIX", "{}"))


class SomeFarAway(Photographs):
    def __getitem__(self, index):
        if index % 70 == 11:
            time.sleep(0.6)
        return super().__getitem__(index)


if __name__ == "__main__":
    for _images, _labels in DataLoader(SomeFarAway(), **OPTIONS):
        time.sleep(0.035)  # the accelerator computes

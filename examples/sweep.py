"""A small image model, trained with every combination of the loader's options, as courses on Jean Zay do by hand.

Sweeps workers x prefetch x pinned memory x persistent workers, and prints a table: settings, loading time of a batch,
training time of all epochs, the starts of workers included. `penstock tune` finds the best line without trying them
all.

    python examples/sweep.py [--epochs 3] [--workers 0 1 2 4] [--prefetch 2 4]
"""

from __future__ import annotations

import argparse
import itertools
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import penstock

BATCH_SIZE = 16
OPTIONS = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers")


class Images(Dataset[tuple[torch.Tensor, int]]):
    """Pictures that are cropped and flipped when they are read, as for training."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        draw = torch.Generator().manual_seed(index)
        image = torch.randint(0, 255, (3, 96, 96), dtype=torch.uint8, generator=draw)
        top, left = torch.randint(0, 32, (2,), generator=draw).tolist()
        crop = image[:, top : top + 64, left : left + 64].float().div_(255)
        return (crop.flip(-1) if index % 2 else crop), index % 10


def make_step() -> Callable[[Any], None]:
    """One step of training a small convolutional network."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(
        nn.Conv2d(3, 16, 5, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 10)
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        images, labels = (part.to(device, non_blocking=True) for part in batch)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def train(data: Images, step: Callable[[Any], None], epochs: int, options: dict[str, Any]) -> tuple[float, float]:
    """(seconds waited for a batch, seconds of all epochs)"""
    num_batches, waited, begin = 0, 0.0, time.perf_counter()
    with penstock.DataLoader(data, BATCH_SIZE, shuffle=True, **options) as loader:
        for _ in range(epochs):
            asked = time.perf_counter()
            for batch in loader:
                waited += time.perf_counter() - asked
                num_batches += 1
                step(batch)
                asked = time.perf_counter()
    return waited / num_batches, time.perf_counter() - begin


def main() -> None:
    """Run the sweep, and print the table, the fastest first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--prefetch", type=int, nargs="+", default=[2, 4])
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", ".*(pin_memory|worker processes).*")
    data, step = Images(), make_step()
    train(data, step, 1, {})  # torch's own start
    rows = []
    for values in itertools.product(arguments.workers, arguments.prefetch, (False, True), (False, True)):
        options = dict(zip(OPTIONS, values, strict=True))
        if not options["num_workers"]:
            if options["persistent_workers"] or options["prefetch_factor"] != arguments.prefetch[0]:
                continue  # the same: nothing is computed ahead
            del options["prefetch_factor"]
        rows.append((*train(data, step, arguments.epochs, options), options))
    print(*OPTIONS, "loading_time", "training_time")
    for loading, training, options in sorted(rows, key=lambda row: row[1]):
        cells = [f"{options.get(name, '–')!s:>{len(name)}}" for name in OPTIONS]
        print(*cells, f"{1e3 * loading:>9.2f} ms", f"{training:>11.2f} s")


if __name__ == "__main__":
    main()

"""A small image model, trained with every combination of the loader's options, as courses on Jean Zay do by hand.

Sweeps workers x prefetch x pinned memory x persistent workers, and prints a table: settings, loading time, training
time. `penstock tune` finds the best line of it without trying them all.

    python examples/sweep.py [--steps 20] [--workers 0 1 2 4] [--prefetch 2 4]
"""

from __future__ import annotations

import argparse
import time
import warnings

import torch
from torch import nn
from torch.utils.data import Dataset

import penstock
from penstock.report import TextTable, format_seconds
from penstock.trials import TrainStep, take_turn
from penstock.tuning import arms_of

BATCH_SIZE = 16


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


def make_step() -> TrainStep:
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


def main() -> None:
    """Run the sweep, and print the table, the fastest first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--prefetch", type=int, nargs="+", default=[2, 4])
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", ".*(pin_memory|worker processes).*")
    flags = {"pin_memory": (False, True), "persistent_workers": (False, True)}
    space = {"num_workers": arguments.workers, "prefetch_factor": arguments.prefetch, **flags}
    data, step, measured = Images(), make_step(), []
    for options in arms_of(space):
        begun = time.perf_counter()
        with penstock.DataLoader(data, BATCH_SIZE, shuffle=True, **options) as loader:
            measured.append((options, take_turn(loader, step, num_steps=arguments.steps, warm_up=4, begun=begun)))
    measured.sort(key=lambda each: each[1].seconds)
    rows = [
        (
            *(str(options.get(name, "–")) for name in space),
            format_seconds(turn.loading_seconds),
            format_seconds(turn.seconds),
            f"{turn.cores:.2f}",
        )
        for options, turn in measured
    ]
    print(TextTable((*space, "loading_time", "training_time", "cores"), rows))


if __name__ == "__main__":
    main()

"""Classify the images of a folder with one subfolder per class.

    python examples/image_folder.py run/ --epochs 2

`prepare` decodes and resizes once; after that, an epoch reads pixels at memory speed. The augmentation draws from the
generator it is given, so a row looks the same whichever worker computes it, and different in each epoch.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import small_data
import torch
from torch import nn

import penstock

SIZE = 32


@penstock.pure
def augment(row: dict, rng: np.random.Generator) -> dict:
    """Mirror half of the images, and turn pixels into numbers around 0."""
    pixels = row["image"][:, ::-1] if rng.random() < 0.5 else row["image"]
    return {"pixels": pixels.transpose(2, 0, 1).astype(np.float32) / 127.5 - 1, "label": row["label"]}


@penstock.pure
def plain(row: dict, rng: np.random.Generator) -> dict:
    """The same without drawing: for evaluation."""
    return {"pixels": row["image"].transpose(2, 0, 1).astype(np.float32) / 127.5 - 1, "label": row["label"]}


def main() -> None:
    """Train and evaluate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=2)
    arguments = parser.parse_args()

    if not (arguments.folder / "data").exists():
        photographs = small_data.photographs(arguments.folder / "photographs")
        penstock.prepare(photographs, arguments.folder / "data", transform=penstock.DecodeImage(size=SIZE))
    data = penstock.open(arguments.folder / "data")
    train, test = data.split({"train": 0.75, "test": 0.25}, seed=7).values()

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 2)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    with penstock.DataLoader(train.shuffle(seed=7).map(augment).batch(8)) as loader:
        for epoch in range(arguments.epochs):
            for batch in loader:
                loss = nn.functional.cross_entropy(model(batch["pixels"]), batch["label"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            print(f"epoch {epoch}: loss {loss.item():.3f}")

    model.eval()
    right = total = 0
    with torch.no_grad(), penstock.DataLoader(test.map(plain).batch(8, tail="short")) as loader:
        for batch in loader:
            right += int((model(batch["pixels"]).argmax(1) == batch["label"]).sum())
            total += len(batch["label"])
    print(f"{right} of {total} images of the test split are right")


if __name__ == "__main__":
    main()

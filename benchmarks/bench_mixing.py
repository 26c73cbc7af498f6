"""How far a windowed shuffle is from a full one, on data stored class by class: the table in docs/plans.md.

Two shapes: images of an ImageNet-like set (1.28 M samples of 110 KB, 1,000 classes in class folders), and rows of
tokens (16 KiB each, 64 GiB, 20 domains one after the other). No data is read: an order is arithmetic, and a sample's
class follows from its index. For each group: classes in a batch of 256, and the variance of class counts per batch as a
multiple of that under a full shuffle, over batches spread evenly over an epoch. A full shuffle is 1 but for chance.

    python benchmarks/bench_mixing.py
"""

from __future__ import annotations

import argparse

import numpy as np
from _machine import print_result
from numpy.typing import NDArray

from penstock.order import FullOrder, Order, WindowedOrder

WINDOW_BYTES = 4 << 20
BATCH = 256
SHAPES = {"images": (1_281_167, 110_000, 1_000), "token rows": (4_194_304, 16_384, 20)}
GROUPS = (16, 64, 256, 1024, 4096)


def main() -> None:
    """Measure every group on both shapes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=400, help="batches to count classes in")
    arguments = parser.parse_args()
    results = {}
    for name, (num_samples, sample_bytes, num_classes) in SHAPES.items():
        classes = np.arange(num_samples) * num_classes // num_samples
        windows = np.full(-(-num_samples // (WINDOW_BYTES // sample_bytes)), WINDOW_BYTES // sample_bytes)
        windows[-1] -= windows.sum() - num_samples
        orders: dict[str, Order] = {
            str(group): WindowedOrder(windows, seed=7, epoch=0, group=group) for group in GROUPS
        }
        orders["full"] = FullOrder(num_samples, seed=7, epoch=0)
        results[name] = {group: measure(order, classes, arguments.batches) for group, order in orders.items()}
    print_result("mixing", vars(arguments), results)


def measure(order: Order, classes: NDArray[np.int64], num_batches: int) -> dict[str, float]:
    """Classes in a batch, and the variance of their counts over a full shuffle's."""
    firsts = np.linspace(0, order.num_rows - BATCH, num_batches).astype(np.int64)
    batches = classes[order.rows(firsts[:, None] + np.arange(BATCH))]
    shares = np.bincount(classes) / len(classes)
    counts = np.stack([np.bincount(batch, minlength=len(shares)) for batch in batches])
    expected = BATCH * shares * (1 - shares)
    return {
        "classes": round(float((counts > 0).sum(axis=1).mean()), 1),
        "variance": round(float(((counts - BATCH * shares) ** 2).mean(axis=0).sum() / expected.sum()), 2),
    }


if __name__ == "__main__":
    main()

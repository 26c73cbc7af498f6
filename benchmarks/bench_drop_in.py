"""Is changing the import line worth it? A torch map-style dataset, two process workers, torch's loader beside ours.

1. Rows of 2048 int64 tokens, batches of 32.
2. Images of 3 x 224 x 224 uint8, batches of 64; a sample costs next to nothing.
3. A transform that is Python and nothing else: there is nothing to win, and nothing may be lost.
4. A dataset of 10 M Python objects: private pages of the workers after 500,000 samples.

The two take turns in each round; figures are medians over rounds. Beside samples/s there is the processor time of
trainer and workers per sample, which a busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from _machine import print_result
from torch.utils.data import DataLoader, Dataset

import penstock

LOADERS = {"torch": DataLoader, "penstock": penstock.DataLoader}
_TICKS = os.sysconf("SC_CLK_TCK")


class Tokens(Dataset[torch.Tensor]):
    """Rows of one long tensor."""

    def __init__(self, num_rows: int) -> None:
        self.rows = torch.randint(0, 50_000, (num_rows, 2048))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


class Images(Dataset[torch.Tensor]):
    """Decoded images, a few of them again and again."""

    def __init__(self, length: int) -> None:
        self.images = torch.randint(0, 256, (256, 3, 224, 224), dtype=torch.uint8)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.images[index % 256]


class PythonTransform(Dataset[torch.Tensor]):
    """About 2 ms of Python per sample."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        total = 0
        for number in range(40_000):
            total += (number ^ index) & 7
        return torch.tensor(total)


class Objects(Dataset[int]):
    """Ten million strings in a list, as many datasets keep their file names."""

    def __init__(self, length: int) -> None:
        self.names = [f"sample-{number}.jpg" for number in range(length)]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> int:
        return len(self.names[index])


def processes() -> list[int]:
    """This process and its children."""
    tasks = Path("/proc/self/task").glob("*/children")
    return [os.getpid(), *(int(pid) for task in tasks for pid in task.read_text().split())]


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def private_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("Private_Dirty", "Private_Clean")))


def run(kind: str, dataset: Dataset[Any], batch_size: int, epochs: int) -> tuple[float, float]:
    """(samples/s, processor microseconds per sample) of whole epochs with workers that run already."""
    loader = LOADERS[kind](dataset, batch_size=batch_size, num_workers=2, persistent_workers=True)
    for _ in loader:
        pass
    pids = processes()
    before, begin, num_samples = sum(map(cpu_seconds, pids)), time.perf_counter(), 0
    for _ in range(epochs):
        for batch in loader:
            num_samples += len(batch)
    seconds = time.perf_counter() - begin
    return num_samples / seconds, (sum(map(cpu_seconds, pids)) - before) / num_samples * 1e6


def compare(question: str, dataset: Dataset[Any], batch_size: int, epochs: int, rounds: int) -> None:
    figures: dict[str, list[tuple[float, float]]] = {kind: [] for kind in LOADERS}
    for number in range(rounds):
        for kind in sorted(LOADERS, reverse=bool(number % 2)):  # neither is always first
            figures[kind].append(run(kind, dataset, batch_size, epochs))
    ratios = [ours[0] / torchs[0] for ours, torchs in zip(figures["penstock"], figures["torch"], strict=True)]
    shown: dict[str, Any] = {}
    for kind, seen in figures.items():
        shown[f"{kind}, samples/s"] = statistics.median(rate for rate, _ in seen)
        shown[f"{kind}, processor us per sample"] = statistics.median(cpu for _, cpu in seen)
    shown["penstock / torch, samples/s (median of rounds)"] = statistics.median(ratios)
    shown["torch / penstock, processor time"] = (
        shown["torch, processor us per sample"] / shown["penstock, processor us per sample"]
    )
    print_result(question, {"batch_size": batch_size, "num_workers": 2, "rounds": rounds}, shown, "torch")


def compare_memory(num_objects: int, num_samples: int) -> None:
    dataset = Objects(num_objects)
    figures: dict[str, Any] = {}
    for kind, loader_class in LOADERS.items():
        generator = torch.Generator().manual_seed(0)
        loader = loader_class(dataset, batch_size=1000, shuffle=True, num_workers=2, generator=generator)
        for number, _ in enumerate(loader):
            if number == num_samples // 1000:
                figures[f"{kind}, private MB of both workers"] = sum(map(private_bytes, processes()[1:])) / 1e6
                break
    ours, torchs = (figures[f"{kind}, private MB of both workers"] for kind in ("penstock", "torch"))
    figures["penstock / torch"] = ours / torchs
    settings = {"objects": num_objects, "samples": num_samples, "num_workers": 2}
    print_result("Private pages of workers over a dataset of Python objects", settings, figures, "torch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["tokens", "images", "python", "memory"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.only in (None, "tokens"):
        compare("Token rows of 2048 int64", Tokens(6400), 32, 3, arguments.rounds)
    if arguments.only in (None, "images"):
        compare("Images of 3 x 224 x 224 uint8", Images(3200), 64, 2, arguments.rounds)
    if arguments.only in (None, "python"):
        compare("A transform in Python", PythonTransform(800), 16, 1, arguments.rounds)
    if arguments.only in (None, "memory"):
        compare_memory(10_000_000, 500_000)


if __name__ == "__main__":
    main()

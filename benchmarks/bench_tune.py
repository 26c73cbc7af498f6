"""Does `penstock.tune` find what an exhaustive grid finds, and with how many steps?

An image job (JPEGs that are waited for and decoded in worker processes) and a token job (a plan's windows, waited for
and gathered in threads), each with a grid of 25 settings (workers x prefetch). First the grid, every setting `--steps`
steps, in `--passes` passes whose medians are the truth; then `--runs` searches. A run is good when the truth of the
setting that it names is within 5 % of the truth of the best. Storage and accelerator are waits, so that the figures
depend less on what else the machine does.

    python benchmarks/bench_tune.py [--runs 20] [--passes 3] [--jobs images tokens]
"""

from __future__ import annotations

import argparse
import io
import statistics
import time
from typing import Any, ClassVar

import numpy as np
import torch
from _machine import print_result
from PIL import Image

import penstock
from penstock.trials import take_turn
from penstock.tuning import arms_of, key_of, name_of

WORKERS, DEPTHS = (1, 2, 3, 4, 6), (1, 2, 4, 8, 16)


class Photographs:
    """JPEGs in memory, decoded and flipped when they are asked for."""

    def __init__(self, pixels: int) -> None:
        draw = np.random.default_rng(0)
        self._files = []
        for _ in range(64):
            small = draw.integers(0, 255, (8, 8, 3), np.uint8)
            file = io.BytesIO()
            Image.fromarray(small).resize((pixels, pixels)).save(file, "jpeg", quality=90)
            self._files.append(file.getvalue())

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.020 if index % 50 == 0 else 0.001)  # storage
        image = np.array(Image.open(io.BytesIO(self._files[index % len(self._files)])))
        return torch.from_numpy(image).permute(2, 0, 1).flip(-1)


class ImageJob:
    """Photographs from storage that is slow, and at times very slow."""

    space: ClassVar[dict[str, Any]] = {"num_workers": WORKERS, "prefetch_factor": DEPTHS}

    def __init__(self) -> None:
        self._data = Photographs(96)

    def make_loader(self, **options: Any) -> penstock.DataLoader:
        """As a job's."""
        return penstock.DataLoader(self._data, batch_size=12, shuffle=True, **options)

    def train_step(self, batch: torch.Tensor) -> float:
        """As a job's."""
        time.sleep(0.012)  # the accelerator computes
        return float(batch[:, :, ::16].float().mean())


@penstock.pure
def fetch(batch: dict[str, Any]) -> dict[str, Any]:
    """What some batches wait for: a storage window that comes over the network."""
    time.sleep(0.080 if batch["input_ids"][0, 0] % 16 == 0 else 0.012)
    return batch


class TokenJob:
    """Windows of tokens, and something that each batch waits for."""

    space: ClassVar[dict[str, Any]] = {"num_workers": WORKERS, "prefetch": DEPTHS}

    def __init__(self) -> None:
        tokens = np.random.default_rng(0).integers(0, 50_000, 1 << 25, dtype=np.uint16)
        offsets = np.arange(0, len(tokens) + 1, 512)
        data = penstock.from_arrays({"tokens": penstock.Ragged(tokens, offsets)})
        self._plan = data.shuffle(seed=7).window(2048).map(fetch, batched=True).batch(32)
        self._embedding = torch.randn(512, 16)

    def make_loader(self, **options: Any) -> penstock.DataLoader:
        """As a job's."""
        return penstock.DataLoader(self._plan, epochs=None, **options)

    def train_step(self, batch: dict[str, torch.Tensor]) -> float:
        """As a job's."""
        time.sleep(0.012)
        return float(self._embedding[batch["input_ids"][:2] % 512].mean())


def rate_of(job: Any, arm: dict[str, Any], steps: int) -> float:
    begun = time.perf_counter()
    with job.make_loader(**arm) as loader:
        return take_turn(loader, job.train_step, num_steps=steps, warm_up=arm["num_workers"] + 1, begun=begun).rate


def measure(job: Any, runs: int, passes: int, steps: int) -> dict[str, Any]:
    arms = arms_of(job.space)
    rates: dict[Any, list[float]] = {key_of(arm): [] for arm in arms}
    begin = time.perf_counter()
    for number in range(passes):
        for arm in arms if number % 2 else reversed(arms):
            rates[key_of(arm)].append(rate_of(job, arm, steps))
    grid_seconds = (time.perf_counter() - begin) / passes
    truth = {key: statistics.median(values) for key, values in rates.items()}
    best = max(arms, key=lambda arm: truth[key_of(arm)])
    shares, distances, named, seconds = [], [], [], []
    for _ in range(runs):
        begin = time.perf_counter()
        found = penstock.tune(job.make_loader, job.train_step, job.space)
        seconds.append(time.perf_counter() - begin)
        shares.append(found.num_steps / (steps * len(arms)))
        distances.append(1 - truth[key_of(found.options)] / truth[key_of(best)])
        named.append(name_of(found.options))
    noise = statistics.median(statistics.pstdev(each) / statistics.fmean(each) for each in rates.values())
    return {
        "settings": len(arms),
        "grid: steps": steps * len(arms),
        "grid: seconds": grid_seconds,
        "grid: best": name_of(best),
        "grid: best steps/s": truth[key_of(best)],
        "grid: worst / best": min(truth.values()) / truth[key_of(best)],
        "grid: spread of a setting over passes": noise,
        "tune: runs": runs,
        "tune: share of the grid's steps, most": max(shares),
        "tune: seconds": statistics.median(seconds),
        "tune: distance from the best, median": statistics.median(distances),
        "tune: distance from the best, most": max(distances),
        "tune: runs within 5 % of the best": sum(distance <= 0.05 for distance in distances),
        "tune: settings named": {name: named.count(name) for name in sorted(set(named))},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40, help="of each setting in the grid")
    parser.add_argument("--jobs", nargs="+", default=["images", "tokens"], choices=["images", "tokens"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    made = {"images": ImageJob, "tokens": TokenJob}
    figures = {
        name: measure(made[name](), arguments.runs, arguments.passes, arguments.steps) for name in arguments.jobs
    }
    print_result("Does tune find what a grid finds?", vars(arguments), figures, "torch", "pillow")


if __name__ == "__main__":
    main()

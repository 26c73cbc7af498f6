"""Does `penstock.tune` find what an exhaustive grid finds, and with how many steps?

An image job (JPEGs that are waited for and decoded in worker processes) and a token job (a plan's windows, waited for
and gathered in threads), each with a grid of 25 settings (workers x prefetch). First the truth: every setting, in
`--passes` passes of `--truth` steps whose median counts; then `--runs` searches. A run is good when the truth of the
setting that it names is within 5 % of the truth of the best. The grid that a search is compared with takes `--steps`
steps of each setting: fewer than the truth, so that the best of 25 is not the luckiest. Storage and accelerator are
waits, so that the figures depend less on what else the machine does.

Where a machine is too busy for that, `--simulated` runs the same search against a machine in virtual time: workers that
take batches in turn, processors shared by whoever computes, uneven batches, and 3 % of noise on every turn. Truth is
2,000 steps of each setting.

    python benchmarks/bench_tune.py [--runs 20] [--passes 3] [--jobs images tokens] [--simulated]
    python benchmarks/bench_tune.py --keep tune.jsonl --minutes 5      # as often as it takes
"""

from __future__ import annotations

import argparse
import io
import random
import statistics
import time
from typing import Any, ClassVar

import numpy as np
import torch
from _continued import Measurements
from _machine import print_result
from _virtual_job import VirtualJob, draw_images, draw_tokens
from PIL import Image

import penstock
from penstock.tuning import Look, Turn, arms_of, cheapest_within_noise, key_of, name_of, search, take_turn

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


def tune(job: Any) -> dict[str, Any]:
    found = penstock.tune(job.make_loader, job.train_step, job.space)
    return {"options": found.options, "steps": found.num_steps, "seconds": found.seconds, "table": str(found.table())}


def measure(name: str, job: Any, arguments: argparse.Namespace, kept: Measurements) -> dict[str, Any]:
    runs, steps = arguments.runs, arguments.steps
    arms = arms_of(job.space)
    rates: dict[Any, list[float]] = {key_of(arm): [] for arm in arms}
    for number in range(arguments.passes):
        for arm in arms if number % 2 else reversed(arms):
            told = f"{name}, pass {number}, {name_of(arm)}"
            rates[key_of(arm)].append(kept.get(told, lambda arm=arm: rate_of(job, arm, arguments.truth)))
    truth = {key: statistics.median(values) for key, values in rates.items()}
    best = max(arms, key=lambda arm: truth[key_of(arm)])
    found = [kept.get(f"{name}, run {number}", lambda: tune(job)) for number in range(runs)]
    shares = [each["steps"] / (steps * len(arms)) for each in found]
    distances = [1 - truth[key_of(each["options"])] / truth[key_of(best)] for each in found]
    named = [name_of(each["options"]) for each in found]
    noise = statistics.median(statistics.pstdev(each) / statistics.fmean(each) for each in rates.values())
    return {
        "settings": len(arms),
        "grid: steps": steps * len(arms),
        "grid: best": name_of(best),
        "grid: best steps/s": truth[key_of(best)],
        "grid: worst / best": min(truth.values()) / truth[key_of(best)],
        "grid: spread of a setting over passes": noise,
        "tune: runs": runs,
        "tune: share of the grid's steps, most": max(shares),
        "tune: seconds": statistics.median(each["seconds"] for each in found),
        "tune: distance from the best, median": statistics.median(distances),
        "tune: distance from the best, most": max(distances),
        "tune: runs within 5 % of the best": sum(distance <= 0.05 for distance in distances),
        "tune: settings named": {name: named.count(name) for name in sorted(set(named))},
    }


def num_steps(arm: Any) -> int:
    """Of a turn, warm-up included."""
    return 15 + max(2, arm["num_workers"])


def simulate(job: VirtualJob, runs: int, steps: int) -> dict[str, Any]:
    arms = arms_of(job.space)
    truth = {key_of(arm): job.turn(arm, 2000, random.Random(1))[0] for arm in arms}
    best = max(arms, key=lambda arm: truth[key_of(arm)])
    shares, distances, named = [], [], []
    for seed in range(runs):
        rng = random.Random(seed)
        batches = [job.draw_batch(rng) for _ in range(30)]
        cpu = statistics.fmean(each[1] for each in batches)
        look = Look([sum(each) for each in batches], cpu, [sum(job.step)] * 30, job.step[1])
        turns: list[Turn] = []
        asking, used = search(job.space, look, job.cores, turns, rounds=4, cost=lambda arm: num_steps(arm) / 19), 32
        try:
            arm = next(asking)
            while True:
                used += num_steps(arm)
                arm = asking.send(job.turn(dict(arm), 15, rng)[0] * rng.gauss(1, 0.03))
        except StopIteration as end:
            found = cheapest_within_noise(turns, end.value)
        shares.append(used / (steps * len(arms)))
        distances.append(1 - truth[key_of(found)] / truth[key_of(best)])
        named.append(name_of(found))
    return {
        "settings": len(arms),
        "grid: best": name_of(best),
        "grid: worst / best": min(truth.values()) / truth[key_of(best)],
        "tune: runs": runs,
        "tune: share of the grid's steps, most": max(shares),
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
    parser.add_argument("--truth", type=int, default=100, help="of each setting in a pass of the truth")
    parser.add_argument("--jobs", nargs="+", default=["images", "tokens"], choices=["images", "tokens"])
    parser.add_argument("--simulated", action="store_true", help="in virtual time, for machines that are too busy")
    parser.add_argument("--keep", metavar="FILE", help="keep measurements here, and go on with those there")
    parser.add_argument("--minutes", type=float, help="begin no measurement after this time")
    arguments = parser.parse_args()
    if arguments.simulated:
        virtual = {
            "images": VirtualJob(ImageJob.space, draw_images, (0.012, 0.0005)),
            "tokens": VirtualJob(TokenJob.space, draw_tokens, (0.012, 0.0005)),
        }
        figures = {name: simulate(virtual[name], arguments.runs, arguments.steps) for name in arguments.jobs}
        print_result("Does tune find what a grid finds, in virtual time?", vars(arguments), figures)
        return
    torch.set_num_threads(1)
    made = {"images": ImageJob, "tokens": TokenJob}
    kept = Measurements(arguments.keep, arguments.minutes)
    figures = {name: measure(name, made[name](), arguments, kept) for name in arguments.jobs}
    print_result("Does tune find what a grid finds?", vars(arguments), figures, "torch", "pillow")


if __name__ == "__main__":
    main()

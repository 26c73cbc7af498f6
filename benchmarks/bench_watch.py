"""What does watching cost? The same loop plain, watched, and under the doctor's recording, in turns.

1. Microseconds per step that `penstock.watch` adds to a loop that does nothing else, over a list, over torch's loader
   and over Penstock's. Other programs only ever add time, so these are means of the fastest quarter of the rounds.
2. How much slower a healthy training loop is, whose step computes for some milliseconds: short blocks of steps in the
   order plain, plain again, watched, doctor, and back, a ratio for each such round, and the median of all with the
   standard error of it. By the clock; in processor time of the training thread, which is what the clock shows on a
   machine of one's own; and in that of the process and its workers. What plain again differs from plain is no cost.
   Also how much longer `next` takes, as a share of a step: what is known best, since steps differ among themselves.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing.queues
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.utils.data.dataloader
from _machine import print_result
from torch.utils.data import DataLoader, Dataset

import penstock


def run(loader: Iterable[Any]) -> tuple[float, float]:
    """(seconds, processor seconds of this process) of one loop."""
    begin, cpu = time.perf_counter(), time.process_time()
    for _ in loader:
        pass
    return time.perf_counter() - begin, time.process_time() - cpu


def fastest(rounds: list[tuple[float, float]]) -> tuple[float, float]:
    """(seconds, processor seconds): means of the fastest quarter, each on its own."""
    count = max(1, len(rounds) // 4)
    clock, processor = (statistics.mean(sorted(column)[:count]) for column in zip(*rounds, strict=True))
    return clock, processor


def cost_per_step(loader: Any, steps: int, rounds: int) -> dict[str, float]:
    """Microseconds that watching adds to a step."""
    plain, watched = [], []
    for number in range(rounds + 1):  # the first starts workers and fills caches
        for is_watched in (False, True) if number % 2 else (True, False):
            if is_watched:
                watched.append(run(penstock.watch(loader)))  # not closed: that would close the loader's workers, too
            else:
                plain.append(run(loader))
    before, after = fastest(plain[1:]), fastest(watched[1:])
    return {"clock": (after[0] - before[0]) / steps * 1e6, "processor": (after[1] - before[1]) / steps * 1e6}


class Rows(Dataset[torch.Tensor]):
    """Enough for any run, and cheap."""

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), float(index))


class Block(NamedTuple):
    """Seconds of a block of steps."""

    clock: float
    thread: float
    """On a processor, of the training thread."""
    processor: float
    """Of all threads and workers."""
    asking: float
    """In `next`, by the clock."""


class Loop(NamedTuple):
    """One way to get batches, which goes on for ever."""

    batches: Iterator[Any]
    pickler: Any
    """What `multiprocessing.queues` unpacks with: the doctor times it."""


def make_loops(folder: Path) -> dict[str, Loop]:
    """A loop of each kind, with a worker of its own that was started before or after the doctor's hooks."""
    from penstock.doctor import watch_torch

    def loader() -> DataLoader[torch.Tensor]:
        return DataLoader(Rows(), batch_size=16, num_workers=1)

    plain_pickler = multiprocessing.queues._ForkingPickler  # type: ignore[attr-defined]
    loops = {
        "plain": Loop(iter(loader()), plain_pickler),
        "plain again": Loop(iter(loader()), plain_pickler),
        "watched": Loop(iter(penstock.watch(loader())), plain_pickler),
    }
    settings = {"seconds": math.inf, "steps": None, "full": True, "observe": True, "turn_seconds": 1.5, "doctor": None}
    (folder / "settings.json").write_text(json.dumps(settings))
    os.environ["PENSTOCK_DOCTOR"] = str(folder)
    watch_torch(torch.utils.data.dataloader)
    loops["under the doctor"] = Loop(iter(loader()), multiprocessing.queues._ForkingPickler)  # type: ignore[attr-defined]
    return loops


def processor_seconds() -> float:
    """Of this process and all its workers, their threads included."""
    workers = [child.pid for child in torch.multiprocessing.active_children()]
    tasks = (task for pid in workers for task in Path(f"/proc/{pid}/task").iterdir())
    return time.process_time() + sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def take(loop: Loop, step: Callable[[], object], num_steps: int) -> Block:
    """What a block of steps took."""
    multiprocessing.queues._ForkingPickler = loop.pickler  # type: ignore[attr-defined]
    asking = 0.0
    before = Block(time.perf_counter(), time.thread_time(), processor_seconds(), asking)
    for _ in range(num_steps):
        begin = time.perf_counter()
        next(loop.batches)
        asking += time.perf_counter() - begin
        step()
    after = Block(time.perf_counter(), time.thread_time(), processor_seconds(), asking)
    return Block(*(end - begin for begin, end in zip(before, after, strict=True)))


def slow_down(rounds: int, block_steps: int, size: int) -> dict[str, Any]:
    """Ratios to the plain loop, each with its standard error."""
    torch.set_num_threads(1)
    matrix = torch.randn(size, size)
    blocks: dict[str, list[Block]] = {}
    with tempfile.TemporaryDirectory() as folder:
        loops = make_loops(Path(folder))
        for number in range(rounds + 1):  # in the first, workers start and the doctor looks
            for name in (*loops, *reversed(loops)):
                taken = take(loops[name], lambda: matrix @ matrix, block_steps)
                if number:
                    blocks.setdefault(name, []).append(taken)
        loops.clear()
    plain = statistics.median(block.clock for block in blocks["plain"])
    figures: dict[str, Any] = {"step, milliseconds": plain / block_steps * 1e3}
    for name in ("plain again", "watched", "under the doctor"):
        figures[f"{name}: next takes longer, share of a step"] = longer_asking(blocks[name], blocks["plain"]) / plain
        for column, clock in enumerate(Block._fields[:-1]):
            figures[f"{name} / plain, {clock}"] = ratio(blocks[name], blocks["plain"], column)
    return figures


def longer_asking(blocks: list[Block], plain: list[Block]) -> float:
    """Median over pairs of blocks of how many seconds longer `next` took."""
    return statistics.median(ours.asking - theirs.asking for ours, theirs in zip(blocks, plain, strict=True))


def ratio(blocks: list[Block], plain: list[Block], column: int) -> dict[str, float]:
    """Of the sums of each round's two blocks: the median over rounds, and its standard error."""
    ratios = [
        (blocks[first][column] + blocks[first + 1][column]) / (plain[first][column] + plain[first + 1][column])
        for first in range(0, len(plain), 2)
    ]
    middle = statistics.median(ratios)
    spread = 1.4826 * statistics.median(abs(each - middle) for each in ratios)
    return {"median": middle, "error": 1.2533 * spread / math.sqrt(len(ratios))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--ratio-rounds", type=int, default=750, help="of eight blocks each; 0 leaves the ratios out")
    parser.add_argument("--block-steps", type=int, default=2, help="the shorter, the more alike what is compared")
    parser.add_argument("--size", type=int, default=768, help="rows of the matrix that a healthy step multiplies")
    arguments = parser.parse_args()
    steps, rows = arguments.steps, torch.arange(arguments.steps)
    plan = penstock.from_arrays({"x": rows.numpy()}).batch(1)
    loaders = {
        "a list": [None] * steps,
        "torch, inline": DataLoader(rows, batch_size=1),  # type: ignore[arg-type]
        "torch, a worker": DataLoader(rows, batch_size=1, num_workers=1, persistent_workers=True),  # type: ignore[arg-type]
        "penstock, inline": penstock.DataLoader(plan, workers="inline"),
        "penstock, a thread": penstock.DataLoader(plan, workers="thread", num_workers=1),
    }
    figures: dict[str, Any] = {}
    if arguments.rounds:
        costs = {name: cost_per_step(loader, steps, arguments.rounds) for name, loader in loaders.items()}
        figures["µs per step"] = costs
    if arguments.ratio_rounds:
        healthy = slow_down(arguments.ratio_rounds, arguments.block_steps, arguments.size)
        figures["a healthy loop"] = healthy
    print_result("What does watching cost?", vars(arguments), figures, "torch")


if __name__ == "__main__":
    main()

"""Does the loader keep up? Side by side with numpy's bare gather and torch's DataLoader, in one run.

1. 100 MB of tokens in the page cache, shuffled batches of 32 x 2048 int64. The limit is numpy's bare gather in the
   caller's thread, over eight buffers in turn, as a loader has several batches alive; they fit into a cache, and nobody
   hands anything over. Beside it `plan.read`, Penstock in the caller, with 1 and 2 threads and processes, and torch's
   DataLoader with 0, 1 and 2 workers. On two cores the caller and two workers share them.
2. A training step of 20 ms that leaves a core free: what the loader adds to it.
3. Time to the first batch with 8 worker processes, Penstock's from a fork server against torch's forked and spawned:
   of the only loader, of one made beside another, and of one that was made a second before its loop.
4. What the statistics cost.
5. Small batches, 8 x 128 int64, where all that surrounds a batch weighs more than its gather: in a thread and in
   two processes, as they are and with one batch per item (no bundles).
6. JPEGs decoded and cropped in `map`, against the same function called bare on all cores.

All candidates of a question take turns in each round; figures are medians over rounds.
"""

from __future__ import annotations

import argparse
import io
import itertools
import multiprocessing
import shutil
import statistics
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _machine import print_result

import penstock
from penstock.loader import (
    LoaderStatistics,
    Pipeline,
    PlanWork,
    Result,
    count_computed,
    count_handed_over,
    make_engine,
    plan_items,
    steps_per_bundle,
)

ROW, BATCH = 2048, 32
_LIMIT = "numpy's bare gather, eight buffers"


class TokenRows(torch.utils.data.Dataset):
    """What people write: a memory map opened in each worker, one row per sample."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: np.ndarray | None = None
        self._length = path.stat().st_size // (2 * ROW)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._rows is None:
            self._rows = np.memmap(self._path, np.uint16, "r").reshape(-1, ROW)
        return torch.from_numpy(self._rows[index].astype(np.int64))


def make_tokens(folder: Path, num_rows: int) -> None:
    rows = np.random.default_rng(0).integers(0, 2**16, (num_rows, ROW), dtype=np.uint16)
    rows.tofile(folder / "rows.bin")
    with penstock.DatasetWriter(folder / "rows", {"tokens": f"uint16[{ROW}]"}) as writer:
        writer.write_batch({"tokens": rows})


def rate(batches: Iterator[Any], num_batches: int) -> float:
    """Mtok/s over `num_batches`, the first few left out."""
    for _ in range(5):
        next(batches)
    begin = time.perf_counter()
    for _ in range(num_batches):
        next(batches)
    return num_batches * BATCH * ROW / (time.perf_counter() - begin) / 1e6


def bare_gather(path: Path) -> Iterator[np.ndarray]:
    rows = np.memmap(path, np.uint16, "r").reshape(-1, ROW)
    buffers, rng = itertools.cycle(np.zeros((8, BATCH, ROW), np.int64)), np.random.default_rng(1)
    while True:
        for indices in rng.permutation(len(rows))[: len(rows) // BATCH * BATCH].reshape(-1, BATCH):
            out = next(buffers)
            out[...] = rows[indices]
            yield out


def torch_loader(path: Path, num_workers: int) -> Iterator[Any]:
    loader = torch.utils.data.DataLoader(TokenRows(path), BATCH, shuffle=True, num_workers=num_workers)
    while True:
        yield from loader


def throughput(folder: Path, rounds: int) -> dict[str, float]:
    bare = folder / "rows.bin"
    plan = penstock.open(folder / "rows").cast(tokens="int64").shuffle(seed=7).batch(BATCH)
    kinds = [("inline", 0), ("thread", 1), ("thread", 2), ("process", 1), ("process", 2)]
    loaders = {
        f"penstock, {kind} {count}": penstock.DataLoader(plan, workers=kind, num_workers=count, epochs=None)
        for kind, count in kinds
    }
    started: dict[str, tuple[Iterator[Any], int]] = {
        _LIMIT: (bare_gather(bare), 3000),
        "plan.read": ((plan.read(step) for step in itertools.cycle(range(700))), 3000),
        **{name: (iter(loader), 3000) for name, loader in loaders.items()},
        **{f"torch, {count} workers": (torch_loader(bare, count), 150) for count in range(3)},
    }
    rates: dict[str, list[float]] = {name: [] for name in started}
    for _ in range(rounds):
        for name, (batches, count) in started.items():
            rates[name].append(rate(batches, count))
    for loader in loaders.values():
        loader.close()
    medians = {name: statistics.median(values) for name, values in rates.items()}
    figures = {f"{name}, Mtok/s": value for name, value in medians.items()}
    figures |= {f"{name}, share of the limit": medians[name] / medians[_LIMIT] for name in loaders}
    figures["processes, times torch with 2 workers"] = medians["penstock, process 2"] / medians["torch, 2 workers"]
    return figures


def small_batches(folder: Path, rounds: int) -> dict[str, float]:
    """What bundles are for: they are taken away."""
    rows = np.random.default_rng(0).integers(0, 2**16, (100_000, 128), dtype=np.uint16)
    with penstock.DatasetWriter(folder / "small", {"tokens": "uint16[128]"}) as writer:
        writer.write_batch({"tokens": rows})
    plan = penstock.open(folder / "small").cast(tokens="int64").shuffle(seed=7).batch(8)
    kinds: dict[str, tuple[Any, int, PlanWork, int]] = {
        "1 thread": ("thread", 1, PlanWork(plan), steps_per_bundle(plan, 1)),
        "1 thread, no bundles": ("thread", 1, PlanWork(plan), 1),
        "2 processes": ("process", 2, PlanWork(plan), steps_per_bundle(plan, 1)),
        "2 processes, no bundles": ("process", 2, PlanWork(plan), 1),
    }
    pipelines: dict[str, Pipeline] = {}
    for name, (kind, num_workers, work, num_steps) in kinds.items():
        engine = make_engine(work, kind=kind, num_workers=num_workers, start_method="forkserver")
        pipelines[name] = Pipeline(
            engine, work, LoaderStatistics(), convert=lambda batch: batch, prefetch=32, in_order=True
        )
        items = plan_items(plan, 0, None, rank=0, world_size=1, num_parts=1, num_steps=num_steps)
        pipelines[name].start(items, num_steps)
    times: dict[str, list[float]] = {name: [] for name in pipelines}
    for _ in range(4 * rounds):
        for name, pipeline in pipelines.items():
            for _ in range(100):
                pipeline.next()
            begin = time.perf_counter()
            for _ in range(1000):
                pipeline.next()
            times[name].append((time.perf_counter() - begin) / 1000)
    for pipeline in pipelines.values():
        pipeline.close()
    return {f"8 x 128, {name}, us per batch": 1e6 * statistics.median(values) for name, values in times.items()}


def step_overhead(folder: Path, rounds: int) -> dict[str, float]:
    """A step of about 20 ms on one core, with batches from the loader and with none."""
    plan = penstock.open(folder / "rows").cast(tokens="int64").shuffle(seed=7).batch(BATCH)
    torch.set_num_threads(1)
    matrix = torch.randn(600, 600)

    # Into memory that is there: with malloc's mapping and unmapping in the step, a second thread would slow the step
    # down by being there.
    front, back = torch.empty_like(matrix), torch.empty_like(matrix)

    def work(count: int) -> None:
        for _ in range(count):
            torch.mm(matrix, front, out=back)
            torch.mul(back, 1e-3, out=front)

    count = max(1, round(0.02 / (min(timeit.repeat(lambda: work(10), number=1, repeat=5)) / 10)))
    times: dict[str, list[float]] = {"alone": [], "loaded": []}
    with penstock.DataLoader(plan, workers="thread", num_workers=1, epochs=None) as loader:
        batches = iter(loader)
        turns = [("alone", lambda: None), ("loaded", lambda: next(batches))]
        for _ in range(12 * rounds):  # short turns, so that both sides meet the same neighbours
            turns.reverse()
            for name, take in turns:
                begin = time.perf_counter()
                for _ in range(8):
                    take()
                    work(count)
                times[name].append((time.perf_counter() - begin) / 8)
        stats = loader.stats()
    added = [loaded / alone - 1 for alone, loaded in zip(times["alone"], times["loaded"], strict=True)]
    low, _, high = statistics.quantiles(added)
    return {
        "step alone, ms": 1000 * statistics.median(times["alone"]),
        "loader adds to the step, %": 100 * statistics.median(added),
        "uncertain by, %": 100 * (high - low) / len(added) ** 0.5,  # about one standard error of a median
        "of that in next(), us": 1e6 * stats.wait_seconds / stats.num_batches,
        "batches ready when asked for, %": 100 * stats.ready_share,
    }


def statistics_cost(folder: Path, rounds: int) -> dict[str, float]:
    """What counting adds to a step, and what asking for the figures costs."""
    plan = penstock.open(folder / "rows").cast(tokens="int64").shuffle(seed=7).batch(BATCH)
    totals, now = LoaderStatistics(), time.perf_counter()
    result = Result([], 0, was_ready=True, worker=0, produce_seconds=0.0, cpu_seconds=0.0, page_faults=0)

    def count() -> None:
        count_computed(totals, result)
        count_handed_over(totals, now, now, now)

    counting = min(timeit.repeat(count, number=10_000, repeat=rounds)) / 10_000
    with penstock.DataLoader(plan, workers="thread", num_workers=1) as loader:
        next(iter(loader))
        asking = min(timeit.repeat(loader.stats, number=1000, repeat=rounds)) / 1000
    return {"counting, us per step": 1e6 * counting, "stats(), us per call": 1e6 * asking}


def first_batch(folder: Path, rounds: int) -> dict[str, float]:
    plan = penstock.open(folder / "rows").cast(tokens="int64").shuffle(seed=7).batch(BATCH)
    rows = TokenRows(folder / "rows.bin")

    def make() -> penstock.DataLoader:
        return penstock.DataLoader(plan, workers="process", num_workers=8)

    def make_torchs(method: str) -> Any:
        return torch.utils.data.DataLoader(rows, BATCH, shuffle=True, num_workers=8, multiprocessing_context=method)

    times: dict[str, list[float]] = {}
    for _ in range(rounds):
        times.setdefault("penstock", []).append(time_to_first(make))
        with make() as other:
            next(iter(other))
            times.setdefault("penstock, beside another loader", []).append(time_to_first(make))
        early = make()
        time.sleep(1)  # a model is built
        times.setdefault("penstock, made 1 s before", []).append(time_to_first(lambda made=early: made))
        for method in ("fork", "spawn"):
            times.setdefault(f"torch {method}", []).append(time_to_first(lambda method=method: make_torchs(method)))
    medians = {name: statistics.median(values) for name, values in times.items()}
    figures = {f"first batch, 8 processes, {name}, s": value for name, value in medians.items()}
    forked = medians["torch fork"]
    figures |= {f"{name}, over torch fork": value / forked for name, value in medians.items() if "torch" not in name}
    figures["times sooner than spawn"] = medians["torch spawn"] / medians["penstock"]
    return figures


def time_to_first(make: Callable[[], Any]) -> float:
    """Seconds until a loader has handed over its first batch; then it is closed."""
    begin = time.perf_counter()
    loader = make()
    batches = iter(loader)
    next(batches)
    seconds = time.perf_counter() - begin
    del batches
    if isinstance(loader, penstock.DataLoader):
        loader.close()
    return seconds


def decode_and_crop(row: dict[str, Any], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """A training transform: decode, a random crop of 224 x 224."""
    from PIL import Image

    image = Image.open(io.BytesIO(row["jpeg"])).convert("RGB")
    left, top = int(rng.integers(0, image.width - 223)), int(rng.integers(0, image.height - 223))
    return {"image": np.asarray(image.crop((left, top, left + 224, top + 224)))}


def decode_many(jpegs: list[bytes]) -> int:
    rng = np.random.default_rng(0)
    for jpeg in jpegs:
        decode_and_crop({"jpeg": jpeg}, rng)
    return len(jpegs)


def make_jpegs(folder: Path, count: int) -> list[bytes]:
    from PIL import Image

    jpegs, rng = [], np.random.default_rng(0)
    for _ in range(count):
        coarse = Image.fromarray(rng.integers(0, 255, (24, 32, 3), dtype=np.uint8)).resize(
            (500, 375), Image.Resampling.BICUBIC
        )
        buffer = io.BytesIO()
        coarse.save(buffer, "JPEG", quality=90)
        jpegs.append(buffer.getvalue())
    with penstock.DatasetWriter(folder / "jpegs", {"jpeg": "bytes"}) as writer:
        writer.write_batch({"jpeg": jpegs})
    return jpegs


def images(folder: Path, rounds: int) -> dict[str, float]:
    jpegs = make_jpegs(folder, 1280)
    plan = penstock.open(folder / "jpegs").shuffle(seed=7).map(decode_and_crop).batch(64)
    halves = [jpegs[start::2] for start in range(2)]
    times: dict[str, list[float]] = {"bare": [], "loader": []}
    with (
        multiprocessing.get_context("spawn").Pool(2) as pool,
        penstock.DataLoader(plan, workers="process", num_workers=2, epochs=None) as loader,
    ):
        batches = iter(loader)
        next(batches), pool.map(decode_many, halves)
        for _ in range(rounds):
            begin = time.perf_counter()
            pool.map(decode_many, halves, chunksize=1)
            times["bare"].append(time.perf_counter() - begin)
            for _ in range(8):  # what was computed while the other side ran does not count
                next(batches)
            begin = time.perf_counter()
            for _ in range(len(jpegs) // 64):
                next(batches)
            times["loader"].append(time.perf_counter() - begin)
    bare, loaded = (statistics.median(times[name]) for name in ("bare", "loader"))
    return {
        "JPEG decode and crop, bare on 2 cores, images/s": len(jpegs) / bare,
        "the same in the loader, images/s": len(jpegs) / loaded,
        "share of bare": bare / loaded,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["throughput", "step", "statistics", "first", "small", "images"])
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    questions = {
        "throughput": throughput,
        "step": step_overhead,
        "statistics": statistics_cost,
        "first": first_batch,
        "small": small_batches,
        "images": images,
    }
    figures: dict[str, float] = {}
    make_tokens(folder, 25_000)
    try:
        for name, ask in questions.items():
            if arguments.only in (None, name):
                figures |= ask(folder, arguments.rounds)
    finally:
        shutil.rmtree(folder)
    settings = {"row": f"{ROW} uint16 to int64", "batch": BATCH, "rounds": arguments.rounds}
    print_result("A loader beside numpy and torch", settings, figures, "torch")


if __name__ == "__main__":
    main()

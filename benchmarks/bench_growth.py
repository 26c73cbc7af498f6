"""How does cost grow: with ranks, samples, shards, files, columns, bytes, clients, and batches held ahead?

Each question measures one cost at several sizes, in turns, and takes medians. The slope is that of a line through the
points in logarithms: 0 is flat, 1 is proportional. It prints the rows of the table in `docs/growth.md`, and with
`--picture` draws its plots again.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _machine import print_result
from bench_plan import anonymous_bytes, write_hollow_dataset

import penstock
from penstock.report import format_bytes, format_seconds

# That of every picture in the docs.
STYLE = """
  <style>
    svg { color: #24292f }
    text { font: 14px system-ui, sans-serif; fill: currentColor }
    .small { font-size: 12px }
    .line { fill: none; stroke: currentColor; stroke-width: 1.3 }
    .faint { fill: none; stroke: currentColor; stroke-width: 1; opacity: 0.35 }
    .teal { fill: #1a9e8c }
    @media (prefers-color-scheme: dark) { svg { color: #e6edf3 } }
  </style>
"""
PICTURE = Path(__file__).parents[1] / "docs/images/growth.svg"
Cost = Callable[[], float]
"""Measures once."""


@dataclass(frozen=True)
class Question:
    """One cost, and the sizes at which it is measured."""

    what: str
    over: str
    sizes: tuple[int, ...]
    set_up: Callable[[Path, int], Cost]
    """Makes in a folder what a size needs, and returns the measurement."""
    unit: str = "s"
    rounds: int = 3


def timed(body: Callable[[], object]) -> Cost:
    def measure() -> float:
        begin = time.perf_counter()
        body()
        return time.perf_counter() - begin

    return measure


@functools.cache
def short_documents() -> penstock.Dataset:
    """Documents enough for 48 steps of 1,024 ranks, so that no batch is read twice in a round."""
    lengths = np.random.default_rng(0).lognormal(4.5, 1, 3_000_000).astype(np.int64) + 1
    return penstock.from_arrays(
        {"tokens": penstock.Ragged.from_lengths(np.zeros(int(lengths.sum()), np.uint16), lengths)}
    )


def rank_of(stage: str, **shuffle: Any) -> Callable[[Path, int], Cost]:
    """48 steps of one rank, 4 rows each; what a step costs in the mean, in processor time."""

    def set_up(_: Path, world_size: int) -> Cost:
        dataset = short_documents().shuffle(seed=1, **shuffle)
        cut = getattr(dataset, stage)(2048).batch(4 * world_size)
        steps = range(48)
        for step in steps:
            cut.read(step, 1, 0, world_size)

        def measure() -> float:
            begin = time.thread_time()
            for step in steps:
                cut.read(step, 1, world_size - 1, world_size)
            return (time.thread_time() - begin) / len(steps)

        return measure

    return set_up


def first_read(folder: Path, num_documents: int) -> Cost:
    write_hollow_dataset(folder / "ds", num_documents)
    return timed(lambda: penstock.open(folder / "ds").shuffle(seed=7).batch(8).read(1000))


def split_of(_: Path, num_samples: int) -> Cost:
    dataset = penstock.from_arrays({"x": np.zeros(num_samples, np.uint8)})
    fractions = {"train": 0.98, "val": 0.02}
    return timed(lambda: dataset.split(fractions, seed=1, by="index")["train"].shuffle(seed=1).batch(8).read(0))


def weighted(_: Path, num_samples: int) -> Cost:
    weights = np.random.default_rng(0).random(num_samples)
    dataset = penstock.from_arrays({"x": np.zeros(num_samples, np.uint8)})
    return timed(lambda: dataset.sample(weights).shuffle(seed=1).batch(8).read(0))


def shards_of(use: Callable[[Path], object]) -> Callable[[Path, int], Cost]:
    def set_up(folder: Path, num_shards: int) -> Cost:
        tokens = penstock.Ragged.from_lengths(np.zeros(50 * 40 * num_shards, np.uint16), np.full(50 * num_shards, 40))
        with penstock.DatasetWriter(folder / "ds", {"tokens": "uint16[*]"}, shard_bytes=50 * 88) as writer:
            writer.write_batch({"tokens": tokens})
        return timed(lambda: use(folder / "ds"))

    return set_up


def inspect(path: Path) -> None:
    command = [sys.executable, "-m", "penstock", "inspect", str(path), "--json"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def prepared(write: Callable[[Path, int], Any], **more: Any) -> Callable[[Path, int], Cost]:
    """`prepare` of what `write` makes, with one worker and into a new folder each time."""

    def set_up(folder: Path, size: int) -> Cost:
        (folder / "raw").mkdir()
        sources = write(folder / "raw", size)
        numbers = iter(range(1 << 30))
        return timed(lambda: penstock.prepare(sources, folder / str(next(numbers)), workers=1, **more))

    return set_up


def text_lines(folder: Path, num_bytes: int) -> str:
    line = json.dumps({"text": "the same words again and again " * 16}) + "\n"
    (folder / "a.jsonl").write_text(line * (num_bytes // len(line)))
    return str(folder / "*.jsonl")


def small_files(folder: Path, num_files: int) -> str:
    for number in range(num_files):
        (folder / f"{number:06}.txt").write_text(f"the text of file {number}\n")
    return str(folder / "*.txt")


def one_document(folder: Path, num_bytes: int) -> str:
    (folder / "a.txt").write_bytes(b"words and more " * (num_bytes // 15))
    return str(folder / "a.txt")


def wide_table(folder: Path, num_columns: int) -> str:
    row = json.dumps({f"c{number}": number for number in range(num_columns)}) + "\n"
    (folder / "a.jsonl").write_text(row * 200)
    return str(folder / "a.jsonl")


def appended(folder: Path, num_bytes: int) -> Cost:
    """One more source of a hundredth of the size, beside what was prepared."""
    (folder / "raw").mkdir()
    sources = text_lines(folder / "raw", num_bytes)
    penstock.prepare(sources, folder / "ds", workers=1, shuffle=None)
    numbers = iter(range(1 << 30))

    def append() -> float:
        (folder / "more").mkdir(exist_ok=True)
        text_lines(folder / "more", num_bytes // 100)
        (folder / "more/a.jsonl").rename(folder / f"raw/more{next(numbers)}.jsonl")
        return timed(lambda: penstock.prepare(sources, folder / "ds", workers=1, shuffle=None))()

    return append


def empty_documents(_: Path, num_documents: int) -> Cost:
    """Packing of a dataset in which all but a thousandth of the documents are empty."""
    lengths = np.where(np.arange(num_documents) % 1000 == 0, 1000, 0)
    dataset = penstock.from_arrays(
        {"tokens": penstock.Ragged.from_lengths(np.zeros(lengths.sum(), np.uint16), lengths)}
    )
    return timed(lambda: dataset.shuffle(seed=1).pack(2048).batch(4).read(0))


def held_ahead(_: Path, num_rows: int) -> Cost:
    """Memory of a loader that holds `num_rows` rows ahead, in batches of 16; a row takes 64 KiB."""
    dataset = penstock.from_arrays({"tokens": np.zeros((1 << 16, 8192), np.uint16)})

    def measure() -> float:
        before = anonymous_bytes()
        plan = dataset.cast(tokens="int64").shuffle(seed=1).batch(16)
        with penstock.DataLoader(plan, num_workers=1, prefetch_factor=num_rows // 16) as loader:
            batches = iter(loader)
            for _ in range(2 * num_rows // 16):
                next(batches)
            return float(max(1, anonymous_bytes() - before))

    return measure


def clients_of(folder: Path, num_clients: int) -> Cost:
    """32 batches for each of so many loaders at once, from a server with one worker; what a batch takes."""
    with penstock.DatasetWriter(folder / "ds", {"x": "uint16[2048]"}) as writer:
        writer.write_batch({"x": np.zeros((4096, 2048), np.uint16)})
    plan = penstock.open(folder / "ds").shuffle(seed=1).batch(8)
    (folder / "plan.toml").write_text(plan.to_toml())

    def measure() -> float:
        with contextlib.ExitStack() as stack:
            address = stack.enter_context(served(folder / "plan.toml"))
            loaders = [stack.enter_context(penstock.DataLoader(plan, remote=address)) for _ in range(num_clients)]
            clients = [iter(loader) for loader in loaders]
            for batches in clients:
                next(batches)
            with ThreadPoolExecutor(num_clients) as threads:
                take = timed(lambda: list(threads.map(lambda batches: [next(batches) for _ in range(32)], clients)))
                return take() / (32 * num_clients)

    return measure


@contextlib.contextmanager
def served(plan: Path) -> Iterator[str]:
    """The address of `penstock serve` in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "penstock",
        "serve",
        str(plan),
        "--bind",
        "127.0.0.1:0",
        "--workers",
        "1",
        "--json",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            yield json.loads(server.stdout.readline())["address"]
        finally:
            server.terminate()


RANKS, SHARDS, SAMPLES = (1, 4, 16, 64, 256, 1024), (100, 1000, 10_000), (10_000, 100_000, 1_000_000, 10_000_000)
QUESTIONS = (
    Question("a packed batch of a rank", "ranks", RANKS, rank_of("pack"), rounds=9),
    Question("a padded batch of a rank", "ranks", RANKS, rank_of("pad"), rounds=9),
    Question("a batch of windows of a rank", "ranks", RANKS, rank_of("window"), rounds=9),
    Question("open, shuffle, first batch", "documents", (10**6, 10**7, 10**8), first_read),
    Question(
        "lengths of all documents", "shards", SHARDS, shards_of(lambda path: penstock.open(path).lengths("tokens"))
    ),
    Question("a packed plan", "shards", SHARDS, shards_of(lambda path: penstock.open(path).shuffle(1).pack(128))),
    Question("penstock inspect", "shards", SHARDS, shards_of(inspect)),
    Question("split by index", "samples", (*SAMPLES, 100_000_000), split_of),
    Question("first batch of sample(weights)", "samples", SAMPLES, weighted),
    Question("pack nearly empty documents", "documents", SAMPLES[1:], empty_documents),
    Question("prepare JSON lines", "bytes", (10**7, 10**8, 10**9), prepared(text_lines), rounds=1),
    Question("prepare, shuffled", "bytes", (10**7, 10**8, 10**9), prepared(text_lines, shuffle=1), rounds=1),
    Question("append a hundredth", "bytes", (10**7, 10**8, 10**9), appended, rounds=1),
    Question("prepare small files", "files", (200, 2000, 20_000), prepared(small_files), rounds=1),
    Question("prepare one document", "bytes", (10**6, 10**7, 10**8, 5 * 10**8), prepared(one_document), rounds=1),
    Question("prepare 200 rows", "columns", (10, 100, 1000), prepared(wide_table), rounds=1),
    Question("a batch from a server", "clients", (1, 4, 16, 64), clients_of, rounds=1),
    Question("memory of what is held ahead", "rows", (64, 256, 1024), held_ahead, unit="bytes", rounds=1),
)


def slope(costs: dict[int, float]) -> float:
    """Exponent of the power of size that fits best."""
    return float(np.polyfit(np.log(list(costs)), np.log(list(costs.values())), 1)[0])


def measure(question: Question) -> dict[int, float]:
    """The median cost at each size, measured in turns."""
    with tempfile.TemporaryDirectory() as folder:
        places = {size: Path(folder) / str(size) for size in question.sizes}
        for place in places.values():
            place.mkdir()
        costs = {size: question.set_up(place, size) for size, place in places.items()}
        costs[question.sizes[0]]()  # the first of all loads what all need
        rounds = [{size: cost() for size, cost in costs.items()} for _ in range(question.rounds)]
    return {size: statistics.median(each[size] for each in rounds) for size in question.sizes}


def draw(found: dict[Question, dict[int, float]]) -> str:
    """One plot per question, both axes logarithmic, decades as faint lines."""
    width, height, columns = 232, 150, 3
    plots = []
    for number, (question, costs) in enumerate(found.items()):
        x, y = (math.log10(each) for each in costs), [math.log10(each) for each in costs.values()]
        x = list(x)
        low, high = math.floor(min(y)), max(math.ceil(max(y)), math.floor(min(y)) + 1)
        points = [
            (24 + 160 * (a - x[0]) / (x[-1] - x[0]), 118 - 70 * (b - low) / (high - low))
            for a, b in zip(x, y, strict=True)
        ]
        lines = "".join(
            f'<path class="faint" d="M24 {118 - 70 * k / (high - low):.0f}h160"/>' for k in range(high - low + 1)
        )
        dots = "".join(f'<circle class="teal" cx="{a:.1f}" cy="{b:.1f}" r="3"/>' for a, b in points)
        trace = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        plots.append(
            f'<g transform="translate({number % columns * width},{number // columns * height})">'
            f'<text x="4" y="16">{question.what}</text>'
            f'<text class="small" x="4" y="33">{words(costs, question.unit)}, slope {slope(costs):.2f}</text>'
            f'{lines}<polyline class="line" points="{trace}"/>{dots}'
            f'<text class="small" x="4" y="136">{span(question.over, costs)}</text></g>'
        )
    total = height * -(-len(found) // columns)
    size = f'viewBox="0 0 {width * columns} {total}" width="{width * columns}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="How costs grow">'
        f"{STYLE}{''.join(plots)}</svg>\n"
    )


def span(over: str, costs: dict[int, float]) -> str:
    """The sizes, in few characters."""
    if over == "bytes":
        return words({size: size for size in costs}, over)
    first, last = (f"{size:,}" if size < 10**5 else f"{size / 1e6:g} M" for size in (min(costs), max(costs)))
    return f"{first} to {last} {over}"


def words(costs: dict[int, float], unit: str) -> str:
    show = format_seconds if unit == "s" else format_bytes
    return f"{show(costs[min(costs)])} to {show(costs[max(costs)])}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="questions whose name contains this")
    parser.add_argument("--sizes", type=int, default=6, help="only so many of the sizes, the smallest first")
    parser.add_argument("--picture", action="store_true", help=f"draw {PICTURE.name} of the docs again")
    arguments = parser.parse_args()
    found = {}
    for question in QUESTIONS:
        if arguments.only is None or arguments.only in question.what:
            sizes = question.sizes[: max(2, arguments.sizes)]
            found[question] = costs = measure(dataclasses.replace(question, sizes=sizes))
            cells = (question.what, span(question.over, costs), words(costs, question.unit), f"{slope(costs):.2f}")
            print(f"| {' | '.join(cells)} |", flush=True)
    figures = {
        each.what: {**{f"{size:,} {each.over}": cost for size, cost in costs.items()}} for each, costs in found.items()
    }
    slopes = {each.what: slope(costs) for each, costs in found.items()}
    print_result("How does cost grow?", {"sizes": arguments.sizes}, {"cost": figures, "slope": slopes})
    if arguments.picture:
        PICTURE.write_text(draw(found), encoding="utf-8")


if __name__ == "__main__":
    main()

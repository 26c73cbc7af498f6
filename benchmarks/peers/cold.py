"""The first pass over data that is on disk and not in memory: in order, shuffled nearby, and fully shuffled."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import _rows
from _turns import Peer, Question, Turn, endless, run

ORDERS = ("in order", "shuffled nearby", "fully shuffled")
SECONDS = 4.0


def forget(folder: Path) -> None:
    """Drop the files of the question from the page cache; no other process has them mapped."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def reading(batches: Callable[[Path, str], Iterator[Any]], order: str = "") -> Callable[[Path, str], Turn]:
    """Megabytes of rows a second, from the making of the loader to the end of an epoch, or for four seconds."""

    def start(folder: Path, arm: str) -> Turn:
        next(batches(folder, "0 workers" if order else arm))

        def measure() -> dict[str, float]:
            gc.collect()  # or maps of before would hold the pages
            forget(folder)
            begin, number = time.perf_counter(), 0
            made = batches(folder, arm)
            while number < _rows.NUM_ROWS // _rows.BATCH and time.perf_counter() - begin < SECONDS:
                assert next(made) is not None
                number += 1
            rate = number * _rows.BATCH * _rows.ROW * 2 / 1e6 / (time.perf_counter() - begin)
            return {order or arm.partition(", ")[0]: rate}

        return measure

    return start


def bare(folder: Path, arm: str) -> Iterator[Any]:
    """`pread` of a row, or of 1 MiB in order."""
    file, row = os.open(folder / "rows.bin", os.O_RDONLY), 2 * _rows.ROW
    if arm == "in order":
        yield from (os.pread(file, row * _rows.BATCH, at) for at in range(0, row * _rows.NUM_ROWS, row * _rows.BATCH))
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
    for indices in _rows.orders():
        yield [os.pread(file, row, row * int(index)) for index in indices]


def penstock(folder: Path, arm: str) -> Iterator[Any]:
    import penstock

    _rows.penstock(folder, "0 workers")  # writes the data
    dataset = penstock.open(folder / "penstock").cast(tokens="int64")
    order, how = arm.split(", ")
    ordered = {
        "in order": lambda: dataset,
        "shuffled nearby": lambda: dataset.shuffle(seed=7),
        "fully shuffled": lambda: dataset.shuffle(seed=7, mode="full"),
    }
    return iter(penstock.DataLoader(ordered[order]().batch(_rows.BATCH), num_workers=int(how.split()[0]), epochs=None))


def torch(folder: Path, arm: str) -> Iterator[Any]:
    from torch.utils.data import DataLoader

    options = {"shuffle": arm.startswith("fully"), "num_workers": int(arm.split()[-2]), "collate_fn": _rows.keep}
    loader = DataLoader(_rows.Batches(folder), _rows.BATCH, **options)
    return endless(lambda: loader)


WORKERS = ("0 workers", "2 workers")
QUESTION = Question(
    title="Cold reads",
    measures=dict.fromkeys(ORDERS, "MB/s"),
    same="The rows of the first question, dropped from the page cache before every turn, read once from the making of "
    "the loader on. How near `shuffled nearby` stays is each library's default.",
    limit="`pread` of every row by one thread, in order or at random.",
    why="Penstock tells the kernel which rows a shuffle needs next, so that many are read at once, and compares every "
    "block with its checksum before it is used. The others check nothing.",
    prepare=_rows.prepare,
    is_fresh=True,
    peers=(
        Peer("bare pread", reading(bare), ("in order", "fully shuffled"), "limit"),
        Peer(
            "Penstock",
            reading(penstock),
            tuple(f"{order}, {threads}" for order in ORDERS for threads in ("1 thread", "2 threads")),
            "ours",
            ("penstock-data",),
        ),
        Peer(
            "torch",
            reading(torch),
            tuple(f"{order}, {each}" for order in (ORDERS[0], ORDERS[2]) for each in WORKERS),
            packages=("torch",),
        ),
        Peer("LitData", reading(_rows.litdata, ORDERS[1]), WORKERS, packages=("litdata",)),
        Peer(
            "MosaicML", reading(_rows.mosaic, ORDERS[1]), WORKERS, packages=("mosaicml-streaming",), environment="apart"
        ),
        Peer("WebDataset", reading(_rows.web, ORDERS[1]), WORKERS, packages=("webdataset",)),
        Peer("datasets", reading(_rows.hugging_face, ORDERS[2]), WORKERS, packages=("datasets",)),
    ),
)

if __name__ == "__main__":
    run(QUESTION)

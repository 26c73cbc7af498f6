"""What does a batch cost in processor time, and a worker in memory? Two worker processes each."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import _rows
from _turns import Peer, Question, Turn, family, run

WORKERS, SECONDS = 2, 1.5


def processor_seconds() -> float:
    ticks = 0
    for process in family(os.getpid()):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def private_bytes() -> int:
    """Memory that those whom this process started do not share with anybody."""
    total = 0
    for process in family(os.getpid())[1:]:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))
    return total


def costing(batches: Callable[[Path, str], Iterator[Any]]) -> Callable[[Path, str], Turn]:
    def start(folder: Path, arm: str) -> Turn:
        made = batches(folder, arm)

        def measure() -> dict[str, float]:
            for _ in range(48):
                next(made)
            begin, spent, number = time.perf_counter(), processor_seconds(), 0
            while time.perf_counter() - begin < SECONDS:
                assert next(made) is not None
                number += 1
            found = {"processor time of a batch": (processor_seconds() - spent) / number}
            return found | ({"memory of a worker": size / WORKERS} if (size := private_bytes()) else {})

        return measure

    return start


QUESTION = Question(
    title="What it costs",
    measures={"processor time of a batch": "s", "memory of a worker": "bytes"},
    same="The rows of the first question with two worker processes, and Penstock with two threads beside. Processor "
    "time is that of the trainer and all workers; memory is what workers do not share with others, and helper "
    "processes are counted with them.",
    limit="Processor time of one gather, in this process.",
    why="A batch of Penstock is written once, where the trainer reads it. Forked workers share the trainer's memory; "
    "Penstock's start from a small process of their own, which is counted with them. Threads take no memory.",
    prepare=_rows.prepare,
    is_fresh=True,
    peers=(
        Peer("bare gather", costing(_rows.bare), ("",), "limit"),
        Peer("Penstock", costing(_rows.penstock), ("2 processes", "2 threads"), "ours", ("penstock-data",)),
        Peer("torch", costing(_rows.torch), ("item, 2 workers", "getitems, 2 workers"), packages=("torch",)),
        Peer("LitData", costing(_rows.litdata), ("2 workers",), packages=("litdata",)),
        Peer("MosaicML", costing(_rows.mosaic), ("2 workers",), packages=("mosaicml-streaming",), environment="apart"),
        Peer("WebDataset", costing(_rows.web), ("2 workers",), packages=("webdataset",)),
        Peer("datasets", costing(_rows.hugging_face), ("2 workers",), packages=("datasets",)),
        Peer("Grain", costing(_rows.grain), ("2 processes",), packages=("grain",)),
    ),
)

if __name__ == "__main__":
    run(QUESTION)

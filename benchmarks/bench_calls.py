"""How many Python functions a batch passes on its way to the training loop, in the caller's process.

Time per batch drowns in noise on a busy machine; the number of calls does not.

    read        plan.read alone, of packed rows, for comparison
    inline      DataLoader(plan, num_workers=0)
    threads     DataLoader(plan, workers="thread", num_workers=2)
    processes   DataLoader(plan, workers="process", num_workers=2)
    bundles     as threads, for rows that are computed several batches at a time
    torch       DataLoader(torch_dataset, num_workers=2)

Counted are calls of functions in penstock's files, for each further batch after a warm-up. Workers are waited for
before each step, as a training step would: a batch that is not ready yet costs a few calls more, which are not the
question. `--list ROUTE` shows which functions they are.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from _machine import print_result

import penstock

ROWS, TOKENS, BATCH = 4096, 128, 8
WARM_UP, COUNTED, STEP_SECONDS = 40, 60, 0.02
PACKAGE = str(Path(penstock.__file__).parent)


class Rows(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """A map-style dataset: an input and a label."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((TOKENS,), index), index


class Calls:
    """Counts calls of penstock's functions in this thread."""

    def __init__(self) -> None:
        self.by_function: Counter[str] = Counter()

    def __enter__(self) -> Calls:
        sys.setprofile(self._see)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            file = frame.f_code.co_filename.removeprefix(PACKAGE)
            self.by_function[f"{file} {frame.f_code.co_qualname}"] += 1


def reads(plan: penstock.Plan) -> Iterator[Any]:
    """Batches of a plan, without a loader."""
    for step in range(WARM_UP + COUNTED):
        yield plan.read(step)


def routes() -> dict[str, Any]:
    """What makes the batches, by name."""
    offsets = np.arange(0, ROWS * 2 * TOKENS, TOKENS // 2)
    documents = penstock.Ragged(np.zeros(offsets[-1], np.uint16), offsets)
    plan = penstock.from_arrays({"tokens": documents}).shuffle(seed=7).pack(TOKENS).batch(BATCH)
    rows = penstock.from_arrays({"x": np.zeros((ROWS, TOKENS), np.int64)}).shuffle(seed=7).batch(BATCH)
    return {
        "read": lambda: reads(plan),
        "inline": lambda: penstock.DataLoader(plan, num_workers=0),
        "threads": lambda: penstock.DataLoader(plan, num_workers=2, workers="thread"),
        "processes": lambda: penstock.DataLoader(plan, num_workers=2, workers="process"),
        "bundles": lambda: penstock.DataLoader(rows, num_workers=2, workers="thread"),
        "torch": lambda: penstock.DataLoader(Rows(), batch_size=BATCH, num_workers=2),
    }


def count(loader: Any) -> tuple[float, Counter[str]]:
    """(median of the calls per batch, calls of all batches by function)."""
    batches, per_batch, found = iter(loader), [], Counter[str]()
    batch = None
    for step in range(WARM_UP + COUNTED):
        time.sleep(STEP_SECONDS)
        with Calls() as calls:
            batch = next(batches)  # noqa: F841 - held, as a training step holds it
        if step >= WARM_UP:
            per_batch.append(sum(calls.by_function.values()))
            found += calls.by_function
    if hasattr(loader, "close"):
        loader.close()
    mean = sum(per_batch) / len(per_batch)
    return (mean if len(set(per_batch)) > len(per_batch) / 4 else statistics.median(per_batch)), found


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", metavar="ROUTE", help="show the functions that a batch of this route passes")
    options = parser.parse_args()
    made = routes()
    if options.list:
        for name, number in count(made[options.list]())[1].most_common():
            print(f"{number / COUNTED:8.2f}  {name}")
        return
    figures = {name: count(make())[0] for name, make in made.items()}
    print_result("Calls per batch in the caller's process", {"batch": f"{BATCH} x {TOKENS}"}, figures, "torch")


if __name__ == "__main__":
    main()

"""The smallest training loop for the scripts beside it: every rank reads its share, and says how much that was."""

from __future__ import annotations

import argparse
import os

import penstock


def main() -> None:
    """Run one epoch, and print rank, processors and rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--batch", type=int, default=32, help="rows of a step, over all ranks")
    arguments = parser.parse_args()
    plan = penstock.open(arguments.data).shuffle(seed=7).batch(arguments.batch, tail="drop")
    with penstock.DataLoader(plan) as loader:
        rows = sum(len(next(iter(batch.values()))) for batch in loader)
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))  # torchrun's, or Slurm's
    print(f"rank {rank}: {rows} rows from {arguments.data}", flush=True)


if __name__ == "__main__":
    main()

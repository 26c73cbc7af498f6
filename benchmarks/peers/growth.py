"""How cost grows with samples, shards, ranks, files, columns, bytes, clients and batches ahead: `bench_growth.py`.

Penstock alone: what peers cost over samples is in `starts`, and over workers in `workers`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from _turns import HERE, Peer, Question, Turn, write


def elsewhere(folder: Path, arm: Any) -> Turn:
    raise NotImplementedError("bench_growth.py measures")


QUESTION = Question(
    title="How cost grows",
    measures={},
    same="Penstock alone, at several sizes of each, in turns. The slope is the exponent of growth: 0 is flat, 1 is "
    "proportional. [How costs grow](growth.md) says why each is as it is.",
    limit="What must be read at least once grows with a slope of 1.",
    why="Order, position and state are arithmetic: only what is stored, or looked at, has a cost.",
    peers=(Peer("Penstock", elsewhere, kind="ours"),),
)


def main() -> None:
    begin = time.time()
    command = [sys.executable, HERE.parent / "bench_growth.py"]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=1200).stdout
    print(said, flush=True)
    figures = json.loads(said.strip().splitlines()[-1])["figures"]["cost"]
    rows = [
        {"peer": "Penstock", "kind": "ours", "arm": size, "values": {what: [cost]}, "error": None}
        for what, costs in figures.items()
        for size, cost in costs.items()
    ]
    write(QUESTION, rows, {}, time.time() - begin, is_kept=True)


if __name__ == "__main__":
    main()

"""Two epochs from an S3 server of a given bandwidth: `bench_remote.py` with a short setting, as rows of results."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from _turns import ENVIRONMENTS, HERE, Peer, Question, Turn, write

MEGABYTES, BANDWIDTH, CACHES, ROUNDS = 96, 40e6, (1.1, 0.5), 2
NAMES = {"penstock": "Penstock", "obstore": "bare obstore", "streaming": "MosaicML", "litdata": "LitData"}


def elsewhere(folder: Path, arm: Any) -> Turn:
    raise NotImplementedError("bench_remote.py runs the libraries by itself")


QUESTION = Question(
    title="Remote epochs",
    measures={f"{epoch} epoch, cache of {share:.0%}": "s" for share in CACHES for epoch in ("first", "second")},
    same=f"{MEGABYTES} MB of rows of 2,048 uint16 in an S3 server of {BANDWIDTH / 1e6:.0f} MB/s and 30 ms, over "
    "loopback. Two shuffled epochs in a new process, start-up included, with a cache for all of the data, and for "
    "half of it.",
    limit="Bytes over bandwidth, for the first epoch.",
    why="Penstock fetches whole shards in the order of its plan, and evicts what is needed last.",
    peers=(
        Peer("bandwidth", elsewhere, kind="limit"),
        Peer("bare obstore", elsewhere, kind="limit"),
        Peer("Penstock", elsewhere, kind="ours", packages=("obstore",)),
        Peer("MosaicML", elsewhere),
        Peer("LitData", elsewhere),
    ),
)


def main() -> None:
    begin = time.time()
    rows = {name: {"peer": name, "kind": "peer", "arm": "", "values": {}, "error": None} for name in NAMES.values()}
    rows["Penstock"]["kind"], rows["bare obstore"]["kind"] = "ours", "limit"
    floor = {"peer": "bandwidth", "kind": "limit", "arm": "", "values": {}, "error": None}
    told = ["--peers", ENVIRONMENTS / "apart/bin/python", "--kinds", "tokens", "--megabytes", str(MEGABYTES)]
    told += ["--bandwidth", str(BANDWIDTH), "--limit", "40", "--caches", *map(str, CACHES)]
    machine: dict[str, str] = {}
    for _ in range(ROUNDS):
        command = [sys.executable, HERE.parent / "bench_remote.py", *told]
        said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=400).stdout
        print(said, flush=True)
        found = json.loads(said.strip().splitlines()[-1])
        machine = found["machine"]
        for setting, figures in found["figures"].items():
            _, cache, library = setting.split(", ")
            if library not in NAMES:  # what was predicted
                continue
            row = rows[NAMES[library]]
            if "failed" in figures:
                row["error"] = f"{cache}: {figures['failed']}"
                continue
            for epoch in figures:
                row["values"].setdefault(f"{epoch} epoch, cache of {cache.split()[-1]}", []).append(
                    figures[epoch]["seconds"]
                )
                if epoch == "first" and library == "penstock":
                    values = floor["values"].setdefault(f"first epoch, cache of {cache.split()[-1]}", [])
                    values.append((MEGABYTES << 20) / BANDWIDTH)
    versions = {name: value for name, value in machine.items() if name in ("obstore", "torch")}
    write(QUESTION, [floor, *rows.values()], versions, time.time() - begin, is_kept=True)


if __name__ == "__main__":
    main()

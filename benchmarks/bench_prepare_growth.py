"""Does the cost of `penstock prepare` grow with what it reads, and with nothing else?

    python benchmarks/bench_prepare_growth.py                        50, 200 and 800 MB; 1,000 and 10,000 small files
    python benchmarks/bench_prepare_growth.py --megabytes 1000 10000 --files 20000

JSON lines of random words become byte tokens, on two workers. For each size: a first run, the same with `--shuffle`, a
run with nothing to do, and one after files worth 1 % were added. Processor time counts this process and its workers; it
is the steadier measure on a machine that others use. Start-up, which is what one document takes, is subtracted from the
rates. These should be flat, and "appended" should cost about 1 % of the first run. Small files have one document each.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _machine import print_result

from penstock import Tokenize, prepare
from penstock.preparation import Prepared

FILE_BYTES = 10_000_000
WORKERS = 2
WORDS = [f"word{number}" for number in range(5_000)]


def write_files(folder: Path, num_files: int, num_bytes: int, *, first: int = 0) -> None:
    """Files of about this size, of the same documents; each has its own first line."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = random.Random(num_bytes)
    lines, size = [], 0
    while size < num_bytes:
        lines.append(json.dumps({"text": " ".join(generator.choices(WORDS, k=300))}) + "\n")
        size += len(lines[-1])
    text = "".join(lines[1:])
    for number in range(first, first + num_files):
        (folder / f"{number:06d}.jsonl").write_text(json.dumps({"text": f"file {number}"}) + "\n" + text)


def spend(work: Callable[[], Prepared]) -> dict[str, float]:
    """Seconds, and processor seconds of this process and its workers."""
    before = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    begin = time.perf_counter()
    made = work()
    seconds = time.perf_counter() - begin
    after = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    spent = sum(b.ru_utime + b.ru_stime - a.ru_utime - a.ru_stime for a, b in zip(before, after, strict=True))
    return {"seconds": seconds, "processor": spent, "peak_worker_mb": made.peak_worker_bytes / 1e6}


def measure(folder: Path, num_files: int, num_bytes: int) -> dict[str, Any]:
    """All runs on so many files of this size."""
    raw, data = folder / "raw", folder / "data"
    write_files(raw, num_files, num_bytes)

    def run(destination: Path, **more: Any) -> Prepared:
        return prepare(raw, destination, transform=Tokenize("bytes"), workers=WORKERS, shard_bytes=64 << 20, **more)

    found = {"first": spend(lambda: run(data)), "shuffled": spend(lambda: run(folder / "shuffled", shuffle=1))}
    found["nothing to do"] = spend(lambda: run(data))
    write_files(raw, max(1, num_files // 100), num_bytes, first=num_files)
    found["appended"] = spend(lambda: run(data))
    shutil.rmtree(folder)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="*", default=[50, 200, 800])
    parser.add_argument("--files", type=int, nargs="*", default=[1_000, 10_000])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "one"
        start_up = measure(folder, 1, 1)
        print_runs("one document", start_up, start_up, 0.0)
        results = {"start-up": start_up}
        for megabytes in arguments.megabytes:
            num_files = max(100, megabytes * 1_000_000 // FILE_BYTES)
            name = f"{megabytes:,} MB"
            results[name] = measure(folder, num_files, megabytes * 1_000_000 // num_files)
            print_runs(name, results[name], start_up, megabytes / 1000)
        for num_files in arguments.files:
            name = f"{num_files:,} files"
            results[name] = measure(folder, num_files, 1)
            print_runs(name, results[name], start_up, num_files / 1000, unit="1,000 files")
    settings = {"workers": WORKERS, "megabytes": arguments.megabytes, "files": arguments.files}
    print_result("Growth of penstock prepare", settings, results, "pyarrow")


def print_runs(name: str, runs: dict[str, Any], start_up: dict[str, Any], amount: float, unit: str = "GB") -> None:
    print(name)
    for what, spent in runs.items():
        more = spent["processor"] - start_up[what]["processor"]
        rate = f", {more / amount:.2f} s of it per {unit}" if amount else ""
        print(f"  {what:14} {spent['seconds']:7.2f} s, {spent['processor']:7.2f} s of processor time{rate}", flush=True)


if __name__ == "__main__":
    main()

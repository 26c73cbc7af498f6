"""How soon does a stream of a large file start, how often is a byte read, and how many records come per second?

Start: from `penstock.stream` to its first record, for the first and the last of 8 parts of one file of 2 GB, in
order and with a shuffle buffer, and going on from a state in its middle. Bytes: what 8 workers of a loader read of
the file in all, counted at their file objects, beside its size; and what 8 ranks read, which share nothing,
as the kernel counts (rchar of /proc/self/io). Records: one pass over 64 MB of
JSONL, CSV, text and parquet by the stream, by the loop a person would write, and by `datasets` streaming, in
turns; processor time of this process, all threads.
"""

from __future__ import annotations

import argparse
import collections
import csv
import itertools
import json
import mmap
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from _machine import print_result
from torch.utils.data import get_worker_info

import penstock
from penstock.sources._files import LocalFile

PARTS = 8
BUFFER = 1000


def make_records(count: int) -> list[dict[str, Any]]:
    rng = random.Random(0)
    return [
        {"id": number, "text": "word " * rng.randint(5, 40), "score": rng.random(), "label": number % 10}
        for number in range(count)
    ]


def write_large(path: Path, num_bytes: int) -> None:
    block = "".join(json.dumps(record) + "\n" for record in make_records(20_000)).encode()
    with path.open("wb") as file:
        file.write(b'{"id": -1}\n')  # so that the borders of parts are not those of blocks
        for _ in range(0, num_bytes, len(block)):
            file.write(block)


def write_formats(folder: Path, num_bytes: int) -> dict[str, Path]:
    records = make_records(num_bytes // 180)
    paths = {kind: folder / f"small.{kind}" for kind in ("jsonl", "csv", "txt", "parquet")}
    paths["jsonl"].write_text("".join(json.dumps(record) + "\n" for record in records))
    paths["txt"].write_text("".join(record["text"] + "\n" for record in records))
    with paths["csv"].open("w", newline="") as file:
        writer = csv.DictWriter(file, list(records[0]))
        writer.writeheader()
        writer.writerows(records)
    pq.write_table(pa.Table.from_pylist(records), paths["parquet"], row_group_size=50_000)
    return paths


def measure_start(path: Path) -> dict[str, float]:
    figures = {}
    for part, buffer in itertools.product((0, PARTS - 1), (0, BUFFER)):
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            next(iter(penstock.stream(path, rank=part, world_size=PARTS, shuffle_buffer=buffer)))
            times.append(time.perf_counter() - begin)
        name = f"first record of part {part} of {PARTS}, buffer {buffer}, ms"
        figures[name] = 1e3 * statistics.median(times)
    for buffer in (0, BUFFER):
        stream = penstock.stream(path, rank=0, world_size=PARTS, shuffle_buffer=buffer)
        list(itertools.islice(stream, 200_000))
        state = stream.state_dict()
        begin = time.perf_counter()
        later = penstock.stream(path, rank=0, world_size=PARTS, shuffle_buffer=buffer)
        later.load_state_dict(state)
        next(iter(later))
        figures[f"going on at record 200,000, buffer {buffer}, ms"] = 1e3 * (time.perf_counter() - begin)
        figures[f"state, buffer {buffer}, bytes"] = len(json.dumps(state))
    return figures


def measure_bytes(path: Path) -> dict[str, float]:
    size = path.stat().st_size
    figures: dict[str, float] = {"file, bytes": size}
    for buffer in (0, BUFFER):
        name = f"read twice by {PARTS} workers, buffer {buffer}, bytes"
        figures[name] = bytes_read_by_workers(path, buffer) - size
    parts = [penstock.stream(path, format="text", rank=part, world_size=PARTS) for part in range(PARTS)]
    before = bytes_read()
    figures["records"] = sum(count(part) for part in parts)
    figures[f"read twice by {PARTS} ranks, bytes per border"] = (bytes_read() - before - size) / (PARTS - 1)
    return figures


def bytes_read_by_workers(path: Path, buffer: int) -> int:
    counts = memoryview(mmap.mmap(-1, 8 * PARTS)).cast("q")
    read = LocalFile.read

    def count_and_read(file: LocalFile, num_bytes: int = -1, /) -> bytes:
        data = read(file, num_bytes)
        counts[get_worker_info().id] += len(data)
        return data

    stream = penstock.stream(path, format="text", shuffle_buffer=buffer)
    with (
        mock.patch.object(LocalFile, "read", count_and_read),
        penstock.DataLoader(
            stream, batch_size=8192, num_workers=PARTS, collate_fn=len, multiprocessing_context="fork"
        ) as loader,
    ):
        count(loader)
    return sum(counts)


def bytes_read() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def count(records: Iterable[Any]) -> int:
    return sum(1 for _ in records)


def measure_records(paths: dict[str, Path], rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = collections.defaultdict(list)
    num_records = 0
    for _ in range(rounds):
        for kind, path in paths.items():
            for name, read in readers(kind, path).items():
                begin = time.process_time()
                num_records = count(read())
                times[f"{kind}: {name}, thousand records per CPU second"].append(time.process_time() - begin)
    return {name: num_records / statistics.median(each) / 1e3 for name, each in times.items()}


def readers(kind: str, path: Path) -> dict[str, Callable[[], Iterable[Any]]]:
    names = {"txt": "text", "jsonl": "json"}
    return {
        "a loop by hand": lambda: LOOPS[kind](path),
        "penstock.stream": lambda: penstock.stream(path),
        f"penstock.stream, buffer {BUFFER}": lambda: penstock.stream(path, shuffle_buffer=BUFFER),
        "datasets": lambda: load(names.get(kind, kind), path),
        f"datasets, buffer {BUFFER}": lambda: load(names.get(kind, kind), path).shuffle(buffer_size=BUFFER),
    }


def load(kind: str, path: Path) -> Any:
    return datasets.load_dataset(kind, data_files=str(path), split="train", streaming=True)


def loop_parquet(path: Path) -> Iterable[dict[str, Any]]:
    for batch in pq.ParquetFile(path).iter_batches():
        yield from batch.to_pylist()


def loop_jsonl(path: Path) -> Iterable[dict[str, Any]]:
    with path.open("rb") as file:
        yield from map(json.loads, file)


def loop_csv(path: Path) -> Iterable[dict[str, Any]]:
    with path.open(newline="") as file:
        yield from csv.DictReader(file)


def loop_text(path: Path) -> Iterable[dict[str, Any]]:
    with path.open() as file:
        for line in file:
            yield {"text": line.rstrip("\n")}


LOOPS: dict[str, Callable[[Path], Iterable[Any]]] = {
    "jsonl": loop_jsonl,
    "csv": loop_csv,
    "txt": loop_text,
    "parquet": loop_parquet,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=2.0, help="size of the large file")
    parser.add_argument("--mb", type=int, default=64, help="size of the files that records are counted in")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="where the files are written")
    arguments = parser.parse_args()
    datasets.disable_progress_bars()
    settings = {name: value for name, value in vars(arguments).items() if name != "folder"}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        large = Path(folder) / "large.jsonl"
        write_large(large, int(arguments.gb * 1e9))
        print_result("How soon does a stream start?", settings, measure_start(large), "torch")
        print_result("How often is a byte read?", settings, measure_bytes(large), "torch")
        large.unlink()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # datasets warns of its own
            figures = measure_records(write_formats(Path(folder), arguments.mb << 20), arguments.rounds)
        print_result("How many records per second?", settings, figures, "torch", "datasets", "pyarrow")


if __name__ == "__main__":
    main()

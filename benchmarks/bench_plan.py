"""What does a plan cost: the first batch of a billion documents, and packed batches of real text?

1. A dataset whose index is real (lognormal lengths, offsets and checksums written) and whose tokens are
   a hole in the file, so that a billion documents fit on a disk. A fresh process opens it and reads one
   random step; row counts are in the cache already, kernels are loaded by a small plan before.
2. Packed batches of 8 x 4096 from Python's own source files, tokens, labels, positions, document ids and
   borders included, in one thread; beside it numpy's bare gather of as many tokens, in turns.
3. What one rank pays for a batch when there are more ranks: 4 rows per rank of short documents, from 1 to 1,024 ranks,
   packed, padded, cut into windows and mixed. Median, and mean with what is counted for 16 batches at once.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import numpy as np
from _machine import print_result

import penstock
from penstock.schema import Schema
from penstock.shards import Manifest, ShardEntry
from penstock.shards._layout import (
    BLOCK_BYTES,
    CHECKSUMS,
    block_checksums,
    build_header,
    checksum,
    num_blocks,
    plan_layout,
)

ROW, BATCH, SHARD_DOCUMENTS = 4096, 8, 20_000_000


def write_hollow_dataset(folder: Path, num_documents: int) -> None:
    """A dataset of empty tokens and real lengths: offsets are written, tokens are a hole."""
    folder.mkdir()
    schema = Schema.parse({"tokens": "uint16[*]"})
    rng = np.random.default_rng(0)
    entries = []
    for number, begin in enumerate(range(0, num_documents, SHARD_DOCUMENTS)):
        size = min(SHARD_DOCUMENTS, num_documents - begin)
        lengths = rng.lognormal(6.2, 1.1, size).astype(np.int64) + 1
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        entries.append(write_hollow_shard(folder, schema, number, offsets))
    (folder / "manifest.json").write_bytes(Manifest(schema, tuple(entries)).to_bytes())


def write_hollow_shard(folder: Path, schema: Schema, number: int, offsets: np.ndarray) -> ShardEntry:
    counts = {"tokens": int(offsets[-1])}
    layout = plan_layout(schema, len(offsets) - 1, counts)
    values = layout.tensors["tokens.values"]
    table = np.full(num_blocks(values.num_bytes), checksum(bytes(BLOCK_BYTES)), "<u4")
    table[-1] = checksum(bytes((values.num_bytes - 1) % BLOCK_BYTES + 1))
    table = np.concatenate([block_checksums(offsets.view(np.uint8)), table]).astype("<u4")
    assert list(layout.tensors) == ["tokens.offsets", CHECKSUMS, "tokens.values"]
    header = build_header(layout, checksum(table.view(np.uint8)))
    path = folder / f"shard-{number:06d}-{number:016x}.safetensors"
    with open(path, "wb") as file:
        file.write(header)
        offsets.tofile(file)
        table.tofile(file)
        file.truncate(len(header) + layout.data_bytes)
    return ShardEntry(path.name, len(offsets) - 1, counts, path.stat().st_size, len(header), checksum(header))


def anonymous_bytes() -> int:
    """Memory of this process that no file stands behind."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


def first_answer(folder: Path) -> None:
    """In a fresh process: open the dataset, read one random step, print seconds and memory as JSON."""
    begin = time.perf_counter()
    small = penstock.from_arrays({"tokens": [np.arange(size, dtype=np.uint16) for size in range(1, 9)]})
    small.shuffle(seed=1).pack(8).batch(2).read(0)
    loaded = time.perf_counter() - begin
    memory, begin = anonymous_bytes(), time.perf_counter()
    plan = penstock.open(folder).shuffle(seed=7).pack(ROW).batch(BATCH)
    num_batches = plan.num_batches()
    opened = time.perf_counter() - begin
    begin = time.perf_counter()
    plan.read(num_batches * 5 // 7)
    answered = time.perf_counter() - begin
    grown = anonymous_bytes() - memory
    begin = time.perf_counter()
    shuffled = penstock.open(folder).shuffle(seed=7).batch(BATCH)
    shuffled.read(shuffled.num_batches() * 5 // 7)
    alone = time.perf_counter() - begin
    print(json.dumps([loaded, opened, answered, grown / 1e6, alone]))


def billion_documents(folder: Path, num_documents: int) -> dict[str, float]:
    dataset = folder / "hollow"
    write_hollow_dataset(dataset, num_documents)
    begin = time.perf_counter()
    plan = penstock.open(dataset).shuffle(seed=7).pack(ROW)
    counted = plan.num_rows
    counting = time.perf_counter() - begin
    runs = [run_alone(dataset) for _ in range(5)]
    loaded, opened, answered, grown, alone = (statistics.median(column) for column in zip(*runs, strict=True))
    return {
        "documents": num_documents,
        "rows": counted,
        "count rows once, s": counting,
        "load kernels, s": loaded,
        "open, s": opened,
        "first packed batch at a random step, s": answered,
        "private memory it took, MB": grown,
        "shuffle alone: open and first batch, s": alone,
    }


def run_alone(dataset: Path) -> list[float]:
    command = [sys.executable, __file__, "--first-answer", str(dataset)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def real_text() -> penstock.Dataset:
    """Python's source files, two bytes to a token: real lengths, and no tokenizer needed."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    texts = [file.read_bytes() for file in files if "site-packages" not in file.parts]
    return penstock.from_arrays({"tokens": [np.frombuffer(t[: len(t) // 2 * 2], np.uint16) for t in texts]})


def compose_real_text(rounds: int) -> dict[str, float]:
    plan = real_text().shuffle(seed=7).pack(ROW).batch(BATCH)
    first = plan.read(0)
    out = {key: first[key] for key in ("input_ids", "labels", "position_ids", "document_ids")}
    steps = range(plan.num_batches() - 1)
    flat = np.random.default_rng(0).integers(0, 60000, BATCH * ROW * len(steps)).astype(np.uint16).reshape(-1, ROW)
    rows = [np.random.default_rng(step).integers(0, len(flat), BATCH) for step in steps]
    for step in steps:
        plan.read(step, out=out)
    times: dict[str, list[float]] = {"plan": [], "gather": []}
    for _ in range(rounds):
        begin = time.perf_counter()
        for step in steps:
            plan.read(step, out=out)
        middle = time.perf_counter()
        for indices in rows:
            out["input_ids"][...] = flat[indices]
        times["plan"].append(middle - begin)
        times["gather"].append(time.perf_counter() - middle)
    tokens = BATCH * ROW * len(steps)
    plan_time, gather_time = (statistics.median(times[name]) for name in ("plan", "gather"))
    return {
        "packed batches of real text, Mtok/s": tokens / plan_time / 1e6,
        "best round, Mtok/s": tokens / min(times["plan"]) / 1e6,
        "bare gather of the tokens alone, Mtok/s": tokens / gather_time / 1e6,
        "fill of real text, %": 100 * plan.ledger().fill,
    }


def cost_per_rank(rounds: int) -> dict[str, float]:
    """µs of `plan.read` on one rank, by the number of ranks; steps in sequence, as training reads them."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(4.5, 1, 400_000).astype(np.int64) + 1
    values = rng.integers(0, 60000, lengths.sum()).astype(np.uint16)
    dataset = penstock.from_arrays({"tokens": penstock.Ragged.from_lengths(values, lengths)})
    first, second = dataset.shuffle(seed=1), dataset.shuffle(seed=2)
    sources = {"x": (first.pack(2048), 0.7), "y": (second.pack(2048), 0.3)}
    plans = {
        "packed": first.pack(2048),
        "padded": first.pad(),
        "windows": first.window(2048),
        "mixed": penstock.mix(sources, seed=3, epoch="x"),
    }
    figures = {}
    for name, plan in plans.items():
        for world_size in (1, 4, 16, 64, 256, 1024):
            cut, times = plan.batch(4 * world_size), []
            cut.read(0, 1, 0, world_size)
            for number in range(8 * rounds):
                step, epoch = number % cut.num_batches(2), 2
                begin = time.perf_counter()
                cut.read(step, epoch, world_size - 1, world_size)
                times.append(time.perf_counter() - begin)
            figures[f"{name}, {world_size} ranks, median us"] = 1e6 * statistics.median(times)
            figures[f"{name}, {world_size} ranks, mean us"] = 1e6 * statistics.fmean(times)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=float, default=1e8, help="documents of the hollow dataset (default: 1e8)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--first-answer", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.first_answer is not None:
        first_answer(arguments.first_answer)
        return
    folder = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    try:
        figures = billion_documents(folder, int(arguments.documents)) | compose_real_text(arguments.rounds)
        figures |= cost_per_rank(arguments.rounds)
    finally:
        shutil.rmtree(folder)
    settings = {"row": ROW, "batch": BATCH, "lengths": "lognormal(6.2, 1.1)", "rounds": arguments.rounds}
    print_result("A plan over many documents, and packed batches of real text", settings, figures)


if __name__ == "__main__":
    main()

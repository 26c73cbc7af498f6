"""What `penstock demo` does: the longest path through the product that works today.

The corpus is the source code of Python's standard library, which every machine has. Its bytes are
the tokens.
"""

from __future__ import annotations

import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from penstock.cli._description import describe, print_description
from penstock.plan import Dataset, open_dataset
from penstock.report import console, format_bytes, print_json, progress_bar
from penstock.schema import Ragged
from penstock.shards import DatasetWriter, verify

_BATCH, _ROW, _ROUNDS = 32, 2048, 5


def demonstrate(path: Path, *, as_json: bool) -> int:
    """Write, inspect, verify and read a dataset at `path`; print what was seen."""
    written = _write(path)
    sound = verify(path)
    speed = _measure(open_dataset(path))
    if as_json:
        print_json({**written, "is_sound": sound.is_sound, **speed})
        return 0 if sound.is_sound else 1
    out = console()
    out.print(f"[bold]1. Write[/bold]  the Python standard library, one document per file: {written['summary']}\n")
    out.print("[bold]2. Inspect[/bold]\n")
    print_description(describe(path, num_samples=1))
    out.print(f"\n[bold]3. Verify[/bold]  {len(sound.faults)} faults in {format_bytes(sound.num_bytes)}\n")
    out.print(f"[bold]4. Read[/bold]  batches of {_BATCH} random documents, median of {_ROUNDS} rounds")
    out.print(f"   Dataset.read                    {speed['penstock_mb_per_second']:8,.0f} MB/s")
    out.print(f"   ds\\[i] in a loop, as most do     {speed['loop_mb_per_second']:8,.0f} MB/s")
    return 0 if sound.is_sound else 1


def _write(path: Path) -> dict[str, object]:
    files = list(_sources())
    begin, done, total = time.perf_counter(), 0, sum(file.stat().st_size for file in files)
    with (
        progress_bar("write") as on_progress,
        DatasetWriter(
            path, {"tokens": "uint8[*]", "file": "bytes"}, attributes={"corpus": "Python's library"}
        ) as writer,
    ):
        for file in files:
            text = file.read_bytes()
            writer.write({"tokens": np.frombuffer(text, np.uint8), "file": file.name.encode()})
            done += len(text)
            on_progress(done, total)
    seconds = time.perf_counter() - begin
    summary = f"{len(files):,} files, {format_bytes(total)} in {seconds:.2f} s"
    return {"documents": len(files), "bytes": total, "write_seconds": seconds, "summary": summary}


def _sources() -> Iterator[Path]:
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" not in file.parts and file.is_file():
            yield file


def _measure(dataset: Dataset) -> dict[str, float]:
    """MB/s of whole batches and of single samples, in turns, so that a busy machine slows both."""
    tokens = dataset.select_columns(["tokens"])
    rng = np.random.default_rng(0)
    tokens.read(np.arange(len(tokens)))  # maps, checks and compiles

    def read_batch(indices: np.ndarray) -> int:
        columns = tokens.read(indices).values()
        return sum(column.values.nbytes for column in columns if isinstance(column, Ragged))

    def read_samples(indices: np.ndarray) -> int:
        return sum(tokens[int(index)]["tokens"].nbytes for index in indices)

    rates: dict[Callable[[np.ndarray], int], list[float]] = {read_batch: [], read_samples: []}
    for _ in range(_ROUNDS):
        batches = [rng.integers(0, len(tokens), _BATCH) for _ in range(50)]
        for read, seen in rates.items():
            begin = time.perf_counter()
            num_bytes = sum(read(indices) for indices in batches)
            seen.append(num_bytes / 1e6 / (time.perf_counter() - begin))
    medians = [statistics.median(seen) for seen in rates.values()]
    return {"penstock_mb_per_second": medians[0], "loop_mb_per_second": medians[1]}

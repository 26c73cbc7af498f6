"""Start and resume in a large dataset: the first batch of a shuffled epoch, and the batch in its middle.

Penstock has real data; the writers of the others would take hours for 1e9 samples. LitData gets one small shard under
many names, MosaicML an index that names one shard again and again, `datasets` a table whose column is one array many
times, and torch's dataset has a length and nothing else. What is planned, permuted and skipped is as large as it says.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from _turns import Peer, Question, Turn, run

BATCH, SHARD, SIZES = 64, 100_000, (10**6, 10**7, 10**8, 10**9)
MOST_BYTES = 10 << 30
"""Who needs more memory than this fails: the machine has others to feed."""


def peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def timing(make: Callable[[Path, int], Callable[[int], Iterator[Any]]]) -> Callable[[Path, int], Turn]:
    """Seconds from the making of dataset and loader to a batch: the first, and the one in the middle."""

    def start(folder: Path, size: int) -> Turn:
        for small in (SHARD, size):  # the first imports and warms up
            opened = make(folder, small)
            if small == SHARD:
                next(opened(0))

        def measure() -> dict[str, float]:
            resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
            before, begin = peak_bytes(), time.perf_counter()
            assert next(opened(0)) is not None
            first = time.perf_counter() - begin
            begin = time.perf_counter()
            assert next(opened(size // 2 // BATCH)) is not None
            resumed = time.perf_counter() - begin
            return {"first batch": first, "resumed": resumed, "memory": max(peak_bytes() - before, 1 << 16)}

        return measure

    return start


def penstock(folder: Path, size: int) -> Callable[[int], Iterator[Any]]:
    import penstock

    if not (data := folder / f"penstock-{size}").exists():
        with penstock.DatasetWriter(data, {"x": "int8"}) as writer:
            for _ in range(size // SHARD):
                writer.write_batch({"x": np.ones(SHARD, np.int8)})

    def opened(step: int) -> Iterator[Any]:
        loader = penstock.DataLoader(penstock.open(data).shuffle(seed=1).batch(BATCH), num_workers=1)
        if step:
            loader.load_state_dict({**loader.state_dict(), "row": step * BATCH})
        return iter(loader)

    return opened


class Numbers:
    """A length, and a sample that costs nothing."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def torchdata(folder: Path, size: int) -> Callable[[int], Iterator[Any]]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    def moved(state: Any, batches: int) -> Any:
        """The state of another position: all that it counts."""
        if isinstance(state, dict):
            return {key: moved_value(key, value, batches) for key, value in state.items()}
        return state

    def moved_value(key: str, value: Any, batches: int) -> Any:
        if key in ("_num_yielded", "_sampler_iter_yielded", "batches_yielded"):
            return batches
        if key in ("samples_yielded", "yielded"):
            return batches * BATCH
        return moved(value, batches)

    def opened(step: int) -> Iterator[Any]:
        loader = StatefulDataLoader(Numbers(size), BATCH, shuffle=True)
        if step:
            small = StatefulDataLoader(Numbers(10 * BATCH), BATCH, shuffle=True)
            next(iter(small))
            loader.load_state_dict(moved(small.state_dict(), step))
        return iter(loader)

    return opened


def mosaic(folder: Path, size: int) -> Callable[[int], Iterator[Any]]:
    from streaming import MDSWriter, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    if not (folder / "mosaic").exists():
        with MDSWriter(out=str(folder / "mosaic"), columns={"x": "int"}, size_limit=1 << 30) as writer:
            for number in range(SHARD):
                writer.write({"x": number})
    if not (many := folder / f"mosaic-{size}").exists():
        index = json.loads((folder / "mosaic/index.json").read_text())
        many.mkdir()
        os.link(
            folder / "mosaic" / index["shards"][0]["raw_data"]["basename"],
            many / index["shards"][0]["raw_data"]["basename"],
        )
        (many / "index.json").write_text(json.dumps({**index, "shards": index["shards"] * (size // SHARD)}))

    def opened(step: int) -> Iterator[Any]:
        from streaming import StreamingDataLoader

        clean_stale_shared_memory()
        dataset = StreamingDataset(local=str(many), shuffle=True, batch_size=BATCH)
        loader = StreamingDataLoader(dataset, batch_size=BATCH)
        if step:
            loader.load_state_dict(dataset.state_dict(step * BATCH, False))
        return iter(loader)

    return opened


def litdata(folder: Path, size: int) -> Callable[[int], Iterator[Any]]:
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming.writer import BinaryWriter

    if not (folder / "litdata").exists():
        (folder / "litdata").mkdir()
        writer = BinaryWriter(str(folder / "litdata"), chunk_size=SHARD)
        for number in range(SHARD):
            writer[number] = number
        writer.done()
        writer.merge()
    if not (many := folder / f"litdata-{size}").exists():
        index = json.loads((folder / "litdata/index.json").read_text())
        many.mkdir()
        chunks = []
        for number in range(size // SHARD):
            chunks.append({**index["chunks"][0], "filename": f"chunk-0-{number}.bin"})
            os.link(folder / "litdata" / index["chunks"][0]["filename"], many / f"chunk-0-{number}.bin")
        (many / "index.json").write_text(json.dumps({**index, "chunks": chunks}))

    def opened(step: int) -> Iterator[Any]:
        dataset = StreamingDataset(str(many), shuffle=True, drop_last=True)
        if step:
            dataset.load_state_dict(dataset.state_dict(step * BATCH, 1, BATCH))
        return iter(StreamingDataLoader(dataset, batch_size=BATCH, num_workers=0))

    return opened


def hugging_face(folder: Path, size: int) -> Callable[[int], Iterator[Any]]:
    """Shuffled as a whole, by a list of indices; it resumes by leaving out what was read."""
    import datasets
    import pyarrow as pa
    from torchdata.stateful_dataloader import StatefulDataLoader

    chunk = pa.array(np.arange(SHARD, dtype=np.int8))
    table = pa.table({"x": pa.chunked_array([chunk] * (size // SHARD))})

    def opened(step: int) -> Iterator[Any]:
        shuffled = datasets.Dataset(table).shuffle(seed=1, keep_in_memory=True)
        return iter(StatefulDataLoader(shuffled.skip(step * BATCH) if step else shuffled, BATCH))

    return opened


QUESTION = Question(
    title="Start and resume",
    measures={"first batch": "s", "resumed": "s", "memory": "bytes"},
    same=f"Shuffled batches of {BATCH} numbers from 1 to 1,000 million samples: the first batch, and the one in the "
    "middle of the epoch from a state, each with a new dataset and loader. Memory is what the process grew by. Who "
    "needs more than 10 GB of memory, or three minutes, has failed.",
    limit="Reading the index, and one batch.",
    why="Penstock computes the place of any row from its number, so nothing is permuted, stored or skipped. The others "
    "make the order of the whole epoch first, or of all its chunks.",
    over="samples",
    rounds=1,  # the largest sizes take minutes
    limit_seconds=60,
    is_fresh=True,
    peers=(
        Peer("Penstock", timing(penstock), SIZES, "ours", ("penstock-data",)),
        Peer("torchdata", timing(torchdata), SIZES, packages=("torchdata", "torch")),
        Peer("LitData", timing(litdata), SIZES, packages=("litdata",)),
        Peer("MosaicML", timing(mosaic), SIZES, packages=("mosaicml-streaming",), environment="apart"),
        Peer("datasets", timing(hugging_face), SIZES, packages=("datasets",)),
    ),
)

if __name__ == "__main__":
    run(QUESTION)

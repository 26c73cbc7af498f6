"""How each library loads shuffled batches of 32 x 2,048 int64 from 128 MB of uint16, as its documentation says.

An arm names the setting: "2 workers". The first call writes the library's own format beside the plain rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _material
import numpy as np
from _turns import endless

ROW, BATCH, NUM_ROWS = 2048, 32, 32_768
WORKERS = ("0 workers", "1 worker", "2 workers")


def prepare(folder: Path) -> None:
    _material.rows(folder / "rows.bin", NUM_ROWS, ROW)


def memory_map(folder: Path) -> np.ndarray:
    return np.memmap(folder / "rows.bin", np.uint16, "r").reshape(-1, ROW)


def collate(samples: list[Any]) -> Any:
    """For libraries that hand over uint16 rows."""
    import torch

    return torch.from_numpy(np.stack(samples).astype(np.int64))


def as_rows(samples: list[Any]) -> Any:
    return collate([np.frombuffer(sample["tokens"], np.uint16) for sample in samples])


def torch_loader(dataset: Any, arm: str, **options: Any) -> Iterator[Any]:
    from torch.utils.data import DataLoader

    workers = int(arm.split()[-2])
    options = {"batch_size": BATCH, "num_workers": workers, "persistent_workers": workers > 0, **options}
    loader = DataLoader(dataset, **options)
    return endless(lambda: loader)


def orders() -> Iterator[np.ndarray]:
    """Indices of batches, epoch after epoch."""
    for number in itertools.count():
        yield from np.random.default_rng(number).permutation(NUM_ROWS).reshape(-1, BATCH)


def bare(folder: Path, arm: str) -> Iterator[Any]:
    import torch

    rows, buffers = memory_map(folder), [torch.empty((BATCH, ROW), dtype=torch.int64) for _ in range(8)]
    for indices, buffer in zip(orders(), itertools.cycle(buffers), strict=False):
        buffer.numpy()[...] = rows[indices]
        yield buffer


def penstock(folder: Path, arm: str) -> Iterator[Any]:
    import penstock

    if not (folder / "penstock").exists():
        with penstock.DatasetWriter(folder / "penstock", {"tokens": f"uint16[{ROW}]"}) as writer:
            writer.write_batch({"tokens": memory_map(folder)})
    plan = penstock.open(folder / "penstock").cast(tokens="int64").shuffle(seed=7).batch(BATCH)
    kind = "process" if "process" in arm else "thread"
    return iter(penstock.DataLoader(plan, num_workers=int(arm.split()[0]), workers=kind, epochs=None))


class Items:
    """What people write for torch: a memory map, one row per sample."""

    def __init__(self, folder: Path) -> None:
        self.rows = memory_map(folder)

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index: int) -> Any:
        import torch

        return torch.from_numpy(self.rows[index].astype(np.int64))


class Batches(Items):
    """The same, with the method that torch's fetcher calls once for a whole batch."""

    def __getitems__(self, indices: list[int]) -> Any:
        import torch

        return torch.from_numpy(self.rows[indices].astype(np.int64))


def keep(batch: Any) -> Any:
    return batch


def torch(folder: Path, arm: str) -> Iterator[Any]:
    if arm.startswith("getitems"):
        return torch_loader(Batches(folder), arm, shuffle=True, collate_fn=keep)
    return torch_loader(Items(folder), arm, shuffle=True)


def drop_in(folder: Path, arm: str) -> Iterator[Any]:
    import penstock

    loader = penstock.DataLoader(Items(folder), batch_size=BATCH, shuffle=True, num_workers=int(arm.split()[0]))
    return endless(lambda: loader)


def litdata(folder: Path, arm: str) -> Iterator[Any]:
    import torch
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader
    from litdata.streaming.writer import BinaryWriter

    if not (folder / "litdata").exists():
        (folder / "litdata").mkdir()
        writer = BinaryWriter(
            str(folder / "litdata"), chunk_bytes="64MB", item_loader=TokensLoader(ROW), follow_tensor_dimension=True
        )
        for number, row in enumerate(memory_map(folder)):
            writer[number] = torch.from_numpy(row.copy())
        writer.done()
        writer.merge()
    dataset = StreamingDataset(str(folder / "litdata"), item_loader=TokensLoader(ROW), shuffle=True, drop_last=True)
    workers = int(arm.split()[0])
    loader = StreamingDataLoader(
        dataset, batch_size=BATCH, num_workers=workers, collate_fn=collate, persistent_workers=workers > 0
    )
    return endless(lambda: loader)


def mosaic(folder: Path, arm: str) -> Iterator[Any]:
    from streaming import MDSWriter, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    if not (folder / "mosaic").exists():
        clean_stale_shared_memory()
        with MDSWriter(out=str(folder / "mosaic"), columns={"tokens": "ndarray:uint16"}) as writer:
            for row in memory_map(folder):
                writer.write({"tokens": row})
    if not (copy := folder / f"mosaic {arm}").exists():
        copy.symlink_to(folder / "mosaic")  # two datasets of a process may not share a folder
    dataset = StreamingDataset(local=str(copy), shuffle=True, batch_size=BATCH)
    return torch_loader(dataset, arm, collate_fn=as_rows, drop_last=True)


def web(folder: Path, arm: str) -> Iterator[Any]:
    import webdataset

    if not (folder / "rows-000.tar").exists():
        for shard in range(8):
            with webdataset.TarWriter(str(folder / f"rows-{shard:03}.tar")) as tar:
                for number, row in enumerate(memory_map(folder)[shard::8]):
                    tar.write({"__key__": f"{shard}-{number}", "tokens": row.tobytes()})
    source = webdataset.WebDataset(str(folder / "rows-{000..007}.tar"), shardshuffle=8).shuffle(1000).repeat()
    batched = source.batched(BATCH, partial=False, collation_fn=as_rows)
    return iter(webdataset.WebLoader(batched, batch_size=None, num_workers=int(arm.split()[0])))


def hugging_face(folder: Path, arm: str) -> Iterator[Any]:
    import datasets

    if not (folder / "arrow").exists():
        features = datasets.Features({"tokens": datasets.List(datasets.Value("uint16"), length=ROW)})
        datasets.Dataset.from_dict({"tokens": memory_map(folder)}, features=features).save_to_disk(folder / "arrow")
    return torch_loader(datasets.load_from_disk(folder / "arrow").with_format("torch"), arm, shuffle=True)


class Convert:
    """Grain's last step; a class, because its workers are spawned."""

    def __call__(self, batch: np.ndarray) -> np.ndarray:
        return batch.astype(np.int64)


class Source:
    """A memory map that travels to spawned processes as its path."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rows = folder, memory_map(folder)

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index: Any) -> np.ndarray:
        return np.asarray(self.rows[index])

    def __reduce__(self) -> Any:
        return Source, (self.folder,)


def grain(folder: Path, arm: str) -> Iterator[Any]:
    import grain
    import torch

    dataset = grain.MapDataset.source(Source(folder)).seed(7).shuffle().repeat().batch(BATCH).map(Convert())
    if arm == "in the caller":
        batches = dataset.to_iter_dataset(grain.ReadOptions(num_threads=0))
    else:
        batches = dataset.to_iter_dataset()
        if arm != "threads":
            batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=int(arm.split()[0])))
    return map(torch.from_numpy, iter(batches))


def spdl(folder: Path, arm: str) -> Iterator[Any]:
    from spdl.pipeline import PipelineBuilder

    rows, workers = memory_map(folder), int(arm.split()[0])
    builder = PipelineBuilder()
    if "batches" in arm:
        builder = builder.add_source(orders()).pipe(lambda indices: collate(rows[indices]), concurrency=workers)
    else:
        builder = builder.add_source(itertools.chain.from_iterable(orders()))
        builder = builder.pipe(lambda index: rows[index], concurrency=workers).aggregate(BATCH).pipe(collate)
    pipeline = builder.add_sink(4).build(num_threads=workers)
    pipeline.start()
    return iter(pipeline.get_iterator())

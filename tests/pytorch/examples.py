"""Plans to load, functions to map, and what to compare batches by."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

import penstock
from penstock.plan import Dataset, Plan
from pytorch.functions import draw_from_rng, fail_at_some, negate

NUM_ROWS = 43


def numbers(num_rows: int = NUM_ROWS) -> Dataset:
    """A column that names the row, and one that is wide enough to see tearing."""
    wide = np.arange(num_rows, dtype=np.float32)[:, None] + np.zeros(64, np.float32)
    return penstock.from_arrays({"x": np.arange(num_rows), "wide": wide})


def documents(num_documents: int = 90) -> Dataset:
    lengths = np.random.default_rng(3).integers(1, 30, num_documents)
    values = np.arange(lengths.sum(), dtype=np.uint32)
    return penstock.from_arrays({"tokens": penstock.Ragged(values, np.concatenate([[0], np.cumsum(lengths)]))})


def fine_tuning_loader(kind: str, world_size: int, rank: int | None = None) -> penstock.DataLoader[Any]:
    """Batches of four rows over all ranks, as a model of transformers takes them; without a rank, this process's."""
    ranks: dict[str, Any] = {} if rank is None else {"rank": rank, "world_size": world_size}
    if kind == "packed":
        plan = documents(64).shuffle(seed=1).pack(32, labels="same").batch(4)
        return penstock.DataLoader(plan, num_workers=1, **ranks)
    tokens = np.arange(24 * 8).reshape(24, 8)
    rows = penstock.from_arrays({"input_ids": tokens, "labels": tokens, "attention_mask": np.ones_like(tokens)})
    return penstock.DataLoader(rows, batch_size=4 // world_size, shuffle=True, num_workers=0, **ranks)


def plans() -> dict[str, Plan]:
    """A plan of every sort that any worker can run."""
    ds, docs = numbers(), documents()
    kinds = penstock.from_arrays({"x": np.arange(NUM_ROWS), "kind": np.arange(NUM_ROWS) % 3})
    return {
        "plain": ds.shuffle(seed=7).batch(4),
        "packed": docs.shuffle(seed=7).pack(32).batch(4),
        "windows": docs.shuffle(seed=1, mode="full").window(16).batch(4),
        "rng": ds.shuffle(seed=2).map(draw_from_rng).batch(4),
        "batched": docs.shuffle(seed=3).pack(32).map(negate, batched=True).batch(4),
        "short": ds.shuffle(seed=4).batch(8, tail="short"),
        "pad": docs.pack(32).batch(8, tail="pad"),
        "drop": ds.batch(8, tail="drop"),
        "ragged": docs.shuffle(seed=9).batch(4),
        "padded": docs.shuffle(seed=9).pad(24, multiple=8, bucket=32, run=4).batch(4),
        "dealt": docs.shuffle(seed=7).pack(32).batch(4, balance="attention"),
        "by tokens": docs.shuffle(seed=9).pad().batch(tokens=480, multiple=4, tail="short"),
        "left out": docs.shuffle(seed=9).pad().batch(tokens=80, multiple=4, long="drop", balance="tokens"),
        "balanced": kinds.balance("kind").shuffle(seed=5).batch(4, tail="short"),
        "sampled": kinds.sample("kind", rows=30).shuffle(seed=5).batch(4),
        "skipping": ds.shuffle(seed=2).map(fail_at_some, on_error="skip").batch(4),
        "stretched": docs.shuffle(seed=9).pack(32).skip(rows=3).take(rows=25).repeat(2).batch(4),
        "scheduled": penstock.mix(
            {"a": (ds.shuffle(seed=1), 3), "b": (ds.take(range(9)).shuffle(seed=2), 1)},
            seed=7,
            rows=100,
            schedule={32: {"a": 1, "b": 3}, 64: {"b": 1}},
            source_ids=True,
        ).batch(4),
        "kept": docs.zip(penstock.from_arrays({"domain": np.arange(len(docs))})).pack(32, keep="domain").batch(4),
        "unfolded": ds.unfold(5, stride=2).shuffle(seed=1).batch(4),
    }


def plain(value: Any) -> Any:
    """A batch's value as lists, to compare and to keep."""
    if isinstance(value, penstock.Ragged):
        return [plain(value.values), plain(value.offsets)]
    return value.tolist() if isinstance(value, (torch.Tensor, np.ndarray)) else value


def plain_batch(batch: dict[str, Any]) -> dict[str, Any]:
    return {key: plain(value) for key, value in batch.items()}


def expected(plan: Plan, epoch: int = 0, rank: int = 0, world_size: int = 1) -> list[dict[str, Any]]:
    """An epoch as the plan itself reads it."""
    return [plain_batch(plan.read(step, epoch, rank, world_size)) for step in range(plan.num_batches(epoch))]


def received(batches: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [plain_batch(batch) for batch in batches]


def rows_of(batches: Iterable[dict[str, Any]]) -> list[int]:
    """The `x` of every row, in order."""
    return [x for batch in batches for x in batch["x"].tolist()]


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True) if child.status() != "zombie"}


def workers() -> list[int]:
    """Worker processes of this process, without the servers that started them and Python's own helper."""
    return [pid for pid in children() if _is_worker(pid)]


def _is_worker(pid: int) -> bool:
    try:
        process = psutil.Process(pid)
        return not process.children() and "resource_tracker" not in " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # it ended just now
        return False


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

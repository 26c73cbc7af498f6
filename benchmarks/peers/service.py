"""Batches from another process over loopback: a Penstock server, Ray Data, and a bare stream of Arrow Flight."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _turns import HERE, Peer, Question, Turn, rate, run

sys.path.insert(0, str(HERE.parent))
ROW, BATCH, NUM_ROWS = 2048, 32, 16_384
OPEN = contextlib.ExitStack()
"""Servers that live as long as this process."""


def measured(batches: Iterator[Any], num_bytes: float) -> Turn:
    """Megabytes a second, and processor time of the client for each."""

    def measure() -> dict[str, float]:
        begin, spent = time.perf_counter(), time.process_time()
        found = rate(batches, lambda batch: num_bytes / 1e6, 1.0)
        used = (time.process_time() - spent) / (time.perf_counter() - begin)
        return {"rate": found, "client's processor time per GB": 1000 * used / found}

    return measure


def flight(folder: Path, arm: str) -> Turn:
    """Messages of the size of the answers, made beforehand, the same again and again."""
    import bench_service
    from pyarrow import flight

    client = OPEN.enter_context(flight.connect(f"grpc://{OPEN.enter_context(bench_service.child('flight'))}"))

    def batches() -> Iterator[Any]:
        for chunk in client.do_get(flight.Ticket(b"1000000")):
            yield chunk.data.column(0).to_numpy()

    return measured(batches(), bench_service.MESSAGE_BYTES)


def penstock(folder: Path, arm: str) -> Turn:
    import bench_service

    keys = None
    if arm == "mutual TLS":
        from penstock.service import make_certificates

        keys = str(folder / "keys")
        make_certificates(keys, ["127.0.0.1"])
    address = OPEN.enter_context(bench_service.child("tokens", keys=keys))
    loader = OPEN.enter_context(bench_service.remote_loader(bench_service.token_plan(), address, keys))
    return measured(iter(loader), BATCH * ROW * 2)


def ray(folder: Path, arm: str) -> Turn:
    """Blocks in its object store, in random order, rows mixed in a buffer, as its documentation says for training."""
    import numpy as np
    import ray

    ray.init(
        ignore_reinit_error=True, num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    tokens = np.random.default_rng(0).integers(0, 65536, (NUM_ROWS, ROW), dtype=np.uint16)
    dataset = ray.data.from_numpy(np.array_split(tokens, 16)).materialize()

    def batches() -> Iterator[Any]:
        buffer = {"local_shuffle_buffer_size": 1000} if arm == "buffer of 1,000" else {}
        while True:
            yield from dataset.randomize_block_order().iter_batches(batch_size=BATCH, prefetch_batches=8, **buffer)

    return measured(batches(), BATCH * ROW * 2)


QUESTION = Question(
    title="Batches from a server",
    measures={"rate": "MB/s", "client's processor time per GB": "s"},
    same="Shuffled batches of 32 x 2,048 uint16 over loopback, from a server with one worker; Ray Data with two cores. "
    "The Flight server has its messages ready, of 8 MiB each, and gathers nothing.",
    limit="A bare Flight stream.",
    why="Penstock answers over HTTP with many batches in one body, received into memory that is used again.",
    limit_seconds=60,
    peers=(
        Peer("bare Flight", flight, kind="limit", packages=("pyarrow",)),
        Peer("Penstock", penstock, ("in the clear", "mutual TLS"), "ours", ("penstock-data", "aiohttp")),
        Peer("Ray Data", ray, ("blocks", "buffer of 1,000"), packages=("ray",)),
    ),
)

if __name__ == "__main__":
    run(QUESTION)

"""What would nodes fetch from an object store, and how well are batches mixed, with lanes and without?

    python benchmarks/bench_egress.py [--terabytes 10] [--shard-mib 256] [--batch 2048]

A dataset of rows of 16 KiB that exists only as a manifest, nodes of 8 ranks, and `plan.egress`: bytes that a node needs
in an epoch, what it reads at a time, the variance of topic counts per batch on sorted data (1 is a full shuffle), and
how long the simulation itself takes. Caches hold all that a node needs, but where a smaller one is named.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from _machine import print_result

import penstock
from penstock.schema import Schema
from penstock.shards import Manifest, ShardEntry

ROW_TOKENS = 8192
NODES = (2, 8, 32, 128)
ORDERS: dict[str, dict[str, Any]] = {
    "no lanes, group 16": {"group": 16},
    "no lanes, group 256": {"group": 256},
    "lanes 64, group 16": {"lanes": 64, "group": 16},
    "lanes 1024, group 1": {"lanes": 1024, "group": 1},
    "lanes 1024, group 2": {"lanes": 1024, "group": 2},
    "lanes 1024, group 4": {"lanes": 1024, "group": 4},
    "lanes 2048, group 2": {"lanes": 2048, "group": 2},
    "lanes 3072, group 2": {"lanes": 3072, "group": 2},
}


def write_manifest(folder: Path, num_bytes: float, shard_bytes: int) -> None:
    """A dataset of shards that are not there."""
    rows = shard_bytes // (2 * ROW_TOKENS)
    entries = (
        ShardEntry(f"shard-{number:06d}-{number:016x}.safetensors", rows, {}, shard_bytes, 4096, number)
        for number in range(int(num_bytes // shard_bytes))
    )
    manifest = Manifest(Schema.parse({"tokens": f"uint16[{ROW_TOKENS}]"}), tuple(entries))
    (folder / "manifest.json").write_bytes(manifest.to_bytes())


def measure(plan: penstock.Plan, nodes: int, cache_share: float | None) -> dict[str, Any]:
    start = time.perf_counter()
    found = plan.egress(nodes, 8, cache_bytes=cache_share and int(cache_share))
    seconds = time.perf_counter() - start
    return {
        "node_gb_first": round(found.epochs[0].node_bytes / 1e9, 1),
        "node_gb_later": round(found.epochs[-1].node_bytes / 1e9, 1),
        "node_gb_later_lru": round(found.epochs[-1].lru_bytes / 1e9, 1),
        "in_use_gb": round(found.in_use_bytes / 1e9, 1),
        "variance": round(found.variance or 0.0, 2),
        "simulation_seconds": round(seconds, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--terabytes", type=float, default=10.0)
    parser.add_argument("--shard-mib", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2048)
    settings = parser.parse_args()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as path:
        write_manifest(Path(path), settings.terabytes * 1e12, settings.shard_mib << 20)
        start = time.perf_counter()
        dataset = penstock.open(path)
        figures["open_seconds"] = round(time.perf_counter() - start, 2)
        for name, how in ORDERS.items():
            plan = dataset.shuffle(7, **how).batch(settings.batch)
            some = NODES if "lanes" in how else NODES[-1:]  # without lanes, every node reads the same
            figures[name] = {str(nodes): measure(plan, nodes, None) for nodes in some}
            print(name, figures[name], flush=True)
        plan = dataset.shuffle(7, lanes=1024).batch(settings.batch)
        for share in (0.5, 0.1):
            cache = share * settings.terabytes * 1e12 / 128
            figures[f"lanes 1024, 128 nodes, cache of {share:.0%} of the share"] = measure(plan, 128, cache)
        figures["no lanes, cache of 5 %"] = measure(
            dataset.shuffle(7).batch(settings.batch), 128, 5e10 * settings.terabytes
        )
        for nodes, batch in ((100, 800), (120, 960), (96, 768)):
            plan = dataset.shuffle(7, lanes=1024).batch(batch)
            figures[f"lanes 1024, {nodes} nodes"] = measure(plan, nodes, None)
    print_result("What would nodes fetch?", vars(settings), figures)


if __name__ == "__main__":
    main()

"""Training from object storage: how far from the line's own speed, how much is fetched, how long does training wait?

Penstock beside MosaicML Streaming and LitData, each in its own format with the same samples and shards of one size, on
one S3 server of a given bandwidth and latency, over loopback (`tests/s3lite.py`). Two epochs in a new process each;
caches of 100 %, 50 % and 10 % of the data. The floor of an epoch is bytes over bandwidth. Each library shuffles as it
does by default; of Penstock, a group is one storage window, because the data is small: the default would be all of it.

    tokens    rows of 2,048 uint16          images    byte strings of 40 to 160 kB, not decoded

`--need 0.6` trains: each step takes so long that the data is needed at this share of the bandwidth, and `wait` is the
share of time that a step's batch was not there. Without it, batches are taken as they come.

The peers are in an environment of their own, because they want other versions of what Penstock uses:

    python3.11 -m venv peers && peers/bin/pip install mosaicml-streaming litdata numpy torch==2.13.0
    python benchmarks/bench_remote.py --peers peers/bin/python
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROW, WORKERS = 2048, 2
BATCH = {"tokens": 64, "images": 16}
LIBRARIES = ("penstock", "streaming", "litdata")


def samples(kind: str, megabytes: int) -> Iterator[np.ndarray]:
    """The same for every library."""
    rng, left = np.random.default_rng(0), megabytes << 20
    while left > 0:
        if kind == "tokens":
            sample = rng.integers(0, 65536, ROW, dtype=np.uint16)
        else:
            sample = rng.integers(0, 256, int(rng.integers(40_000, 160_000)), dtype=np.uint8)
        left -= sample.nbytes
        yield sample


def write(library: str, kind: str, folder: Path, megabytes: int, shard_bytes: int) -> None:
    """The samples in the library's own format."""
    if library == "penstock":
        import penstock

        columns = {"x": f"uint16[{ROW}]" if kind == "tokens" else "bytes"}
        with penstock.DatasetWriter(folder, columns, shard_bytes=shard_bytes) as writer:
            for sample in samples(kind, megabytes):
                writer.write({"x": sample if kind == "tokens" else sample.tobytes()})
    elif library == "streaming":
        from streaming import MDSWriter

        columns = {"x": "bytes"}
        with MDSWriter(out=str(folder), columns=columns, size_limit=shard_bytes) as writer:
            for sample in samples(kind, megabytes):
                writer.write({"x": sample.tobytes()})
    else:
        from litdata.streaming.writer import BinaryWriter

        folder.mkdir(parents=True)
        writer = BinaryWriter(str(folder), chunk_bytes=shard_bytes)
        for number, sample in enumerate(samples(kind, megabytes)):
            writer[number] = {"x": sample.tobytes()}
        writer.done()
        writer.merge()


def loader_of(library: str, kind: str, cache: Path, cache_bytes: int) -> Any:
    """What a user of the library would write; every batch an epoch, shuffled."""
    url, batch = f"s3://bucket/{library}-{kind}", BATCH[kind]
    if library == "penstock":
        import penstock

        plan = penstock.open(url, cache=cache, cache_bytes=cache_bytes).shuffle(seed=1, group=1).batch(batch)
        return penstock.DataLoader(plan)
    if library == "streaming":
        from streaming import StreamingDataset
        from torch.utils.data import DataLoader

        dataset = StreamingDataset(
            remote=url, local=str(cache), shuffle=True, batch_size=batch, cache_limit=cache_bytes, shuffle_seed=1
        )
        # Forked workers would share the connection over which the parent fetched the index, and mix up their answers.
        fresh = {"multiprocessing_context": "spawn", "persistent_workers": True}
        return DataLoader(dataset, batch_size=batch, num_workers=WORKERS, collate_fn=list, **fresh)
    import litdata
    from litdata.streaming.resolver import Dir

    options = {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}
    dataset = litdata.StreamingDataset(
        Dir(path=str(cache), url=url), shuffle=True, max_cache_size=cache_bytes, storage_options=options, seed=1
    )
    return litdata.StreamingDataLoader(dataset, batch_size=batch, num_workers=WORKERS, collate_fn=list)


def train(library: str, kind: str, cache: Path, cache_bytes: int, step_seconds: float) -> None:
    """The child: two epochs; a line of JSON after each."""
    importlib.import_module(library)
    if library == "streaming":
        from streaming.base.util import clean_stale_shared_memory

        clean_stale_shared_memory()  # a run that was ended leaves names in /dev/shm that break the next one
    if library == "litdata":
        from litdata.streaming import downloader

        downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # it has no setting for servers without TLS
    begin = time.perf_counter()
    loader = loader_of(library, kind, cache, cache_bytes)
    for _ in range(2):
        steps, waited, asked = 0, [], time.perf_counter()
        for _ in loader:
            waited.append(time.perf_counter() - asked)
            steps += 1
            time.sleep(step_seconds)
            asked = time.perf_counter()
        now = time.perf_counter()
        late = sum(waited[len(waited) // 20 + 1 :]) / (now - begin)  # without warm-up
        print(json.dumps({"seconds": now - begin, "steps": steps, "wait": late}), flush=True)
        begin = now
        sys.stdin.readline()  # until the parent has counted what was sent


def measure(
    python: str, library: str, kind: str, folder: Path, cache_bytes: int, step_seconds: float, server: Any, limit: float
) -> dict[str, Any]:
    """Two epochs in a process of their own: seconds, bytes fetched and share of waiting of each."""
    with tempfile.TemporaryDirectory(dir=folder) as cache, tempfile.TemporaryFile() as errors:
        told = ["--child", library, "--kind", kind, "--cache", cache, "--bytes", str(cache_bytes)]
        command = ["timeout", str(limit), python, __file__, *told, "--step-seconds", str(step_seconds)]
        found, before = [], server.num_bytes()
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            for line in process.stdout:
                if not line.startswith(b'{"seconds"'):
                    continue
                after = server.num_bytes()
                found.append({**json.loads(line), "fetched": after - before})
                before = after
                process.stdin.write(b"\n")
                process.stdin.flush()
        if len(found) == 2:
            return {"first": found[0], "second": found[1]}
        if process.returncode == 124:
            return {"failed": f"not done in {limit:.0f} s"}
        errors.seek(0)
        said = errors.read().decode(errors="replace").strip().splitlines()
        reasons = [line for line in said if "Error" in line or "Exists" in line] or said or ["ended"]
        return {"failed": reasons[-1][-200:]}


def tell(figures: dict[str, Any], data_bytes: int, bandwidth: float) -> str:
    """One line: shares of the floor, of the data, of waiting."""
    if "failed" in figures:
        return figures["failed"]
    shares = []
    for name in ("first", "second"):
        each = figures[name]
        floor = data_bytes / bandwidth / each["seconds"]
        shares.append(
            f"{name}: {floor:.2f} of floor, fetched {each['fetched'] / data_bytes:.2f}, wait {each['wait']:.3f}"
        )
    return "; ".join(shares)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="", help="interpreter of an environment with mosaicml-streaming and litdata")
    parser.add_argument("--kinds", nargs="+", default=["tokens", "images"])
    parser.add_argument("--libraries", nargs="+", default=LIBRARIES)
    parser.add_argument("--caches", nargs="+", type=float, default=[1.1, 0.5, 0.1], help="shares of the data")
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--shard-megabytes", type=int, default=4)
    parser.add_argument("--bandwidth", type=float, default=25e6)
    parser.add_argument("--latency", type=float, default=0.03)
    parser.add_argument("--need", type=float, default=0.0, help="share of the bandwidth that training needs")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds for two epochs")
    for name in ("child", "write", "kind", "cache"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    parser.add_argument("--bytes", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--step-seconds", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        train(given.child, given.kind, Path(given.cache), given.bytes, given.step_seconds)
        return
    if given.write:
        write(given.write, given.kind, Path(given.cache), given.megabytes, given.shard_megabytes << 20)
        return
    _compare(given)


def _compare(given: argparse.Namespace) -> None:
    from _machine import print_result

    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    import s3lite

    pythons = {name: sys.executable if name == "penstock" else given.peers for name in given.libraries}
    results: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(s3lite.serve(root / "s3"))
        os.environ.update(server.environment, S3_ENDPOINT_URL=server.endpoint, AWS_DEFAULT_REGION="eu-west-1")
        for kind in given.kinds:
            sizes = {}
            for library, python in pythons.items():
                folder = root / "s3" / "bucket" / f"{library}-{kind}"
                told = ["--write", library, "--kind", kind, "--cache", str(folder), "--megabytes", str(given.megabytes)]
                told += ["--shard-megabytes", str(given.shard_megabytes)]
                subprocess.run([python, __file__, *told], check=True)
                sizes[library] = sum(path.stat().st_size for path in folder.iterdir())
            mean = 2 * ROW if kind == "tokens" else 100_000
            step = BATCH[kind] * mean / (given.need * given.bandwidth) if given.need else 0.0
            server.behave(bandwidth=given.bandwidth, latency_seconds=given.latency)
            for share in given.caches:
                for library, python in pythons.items():
                    size = sizes[library]
                    found = measure(python, library, kind, root, int(share * size), step, server, given.limit)
                    results[f"{kind}, cache {share:.0%}, {library}"] = found
                    print(
                        f"{kind:<8} cache {share:>4.0%} {library:<10} {tell(found, size, given.bandwidth)}", flush=True
                    )
    names = ("megabytes", "shard_megabytes", "bandwidth", "latency", "need")
    settings = {name: getattr(given, name) for name in names}
    print_result("How fast is training from object storage?", settings, results, "obstore", "torch")


if __name__ == "__main__":
    main()

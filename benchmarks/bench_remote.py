"""Training from object storage: how far from the line's own speed, how much is fetched, how long does training wait?

Penstock beside MosaicML Streaming and LitData, each in its own format with the same samples and shards of one size, on
one S3 server of a given bandwidth and latency, over loopback (`tests/s3lite.py`). Two epochs in a new process each;
caches of 110 %, 50 % and 10 % of the data. The floor of an epoch is bytes over bandwidth; `obstore` only fetches the
files, 32 ranges of 8 MiB at once, without a dataset. Each library shuffles as it does by default; of Penstock, a group
is one storage window, because the data is small: the default would be all of it. Beside it stands what `plan.egress`
predicts. CPU is that of all of a library's processes per GB, from its first batch to the end of its first epoch.

    tokens    rows of 2,048 uint16          images    byte strings of 40 to 160 kB, not decoded

`--need 0.6` trains: each step takes so long that the data is needed at this share of the bandwidth, and `wait` is the
share of time that a step's batch was not there, after the first twentieth. Without it, batches are taken as they come.

The peers are in an environment of their own, because they want other versions of what Penstock uses. All of it takes
ten minutes, `--kinds tokens --libraries penstock obstore` one and a half.

    python3.11 -m venv peers && peers/bin/pip install mosaicml-streaming litdata numpy torch==2.13.0
    python benchmarks/bench_remote.py --peers peers/bin/python
"""

from __future__ import annotations

import argparse
import asyncio
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
LIBRARIES = ("penstock", "obstore", "streaming", "litdata")
RANGE_BYTES, RANGES_AT_ONCE = 8 << 20, 32


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
    if library == "obstore":
        return  # it fetches Penstock's files
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


def plan_of(place: str, kind: str, **options: Any) -> Any:
    """The plan of Penstock's run."""
    import penstock

    return penstock.open(place, **options).shuffle(seed=1, group=1).batch(BATCH[kind])


def fetch(kind: str, cache: Path) -> Iterator[None]:
    """All files of the dataset, by obstore alone; nothing the second time."""
    import obstore

    store = obstore.store.from_url(f"s3://bucket/penstock-{kind}", client_options={"allow_http": True})
    sizes = {each["path"]: each["size"] for each in obstore.list_with_delimiter(store)["objects"]}

    async def fill(name: str, begin: int, slots: asyncio.Semaphore) -> None:
        async with slots:
            data = await obstore.get_range_async(store, name, start=begin, end=min(begin + RANGE_BYTES, sizes[name]))
            descriptor = os.open(cache / name.rpartition("/")[2], os.O_WRONLY | os.O_CREAT)
            os.pwrite(descriptor, memoryview(data), begin)
            os.close(descriptor)

    async def fill_all() -> None:
        slots = asyncio.Semaphore(RANGES_AT_ONCE)
        await asyncio.gather(
            *(fill(name, begin, slots) for name in sizes for begin in range(0, sizes[name], RANGE_BYTES))
        )

    yield
    asyncio.run(fill_all())


def cpu_seconds() -> float:
    """Processor time of this process and those that it started, and so on."""
    ticks, parents = {}, {}
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit():
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                parents[int(folder.name)], ticks[int(folder.name)] = int(fields[1]), sum(map(int, fields[11:13]))
    found, own = 0, {os.getpid()}
    while own:
        found += sum(ticks.get(each, 0) for each in own)
        own = {each for each, parent in parents.items() if parent in own}
    return found / os.sysconf("SC_CLK_TCK")


def loader_of(library: str, kind: str, cache: Path, cache_bytes: int) -> Any:
    """What a user of the library would write; every batch an epoch, shuffled."""
    url, batch = f"s3://bucket/{library}-{kind}", BATCH[kind]
    if library == "penstock":
        import penstock

        return penstock.DataLoader(plan_of(url, kind, cache=cache, cache_bytes=cache_bytes))
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
    if library != "obstore":
        import torch  # noqa: F401 - as whoever trains has
    if library == "streaming":
        from streaming.base.util import clean_stale_shared_memory

        clean_stale_shared_memory()  # a run that was ended leaves names in /dev/shm that break the next one
    if library == "litdata":
        from litdata.streaming import downloader

        downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # it has no setting for servers without TLS
    begin = time.perf_counter()
    loader = loader_of(library, kind, cache, cache_bytes) if library != "obstore" else None
    cpu = 0.0
    for epoch in range(2 if loader is not None else 1):
        steps, waited, asked = 0, [], time.perf_counter()
        for _ in loader if loader is not None else fetch(kind, cache):
            waited.append(time.perf_counter() - asked)
            if not steps and not epoch:
                cpu = cpu_seconds()
                print(json.dumps({"started": time.perf_counter() - begin}), flush=True)
            steps += 1
            time.sleep(step_seconds)
            asked = time.perf_counter()
        now = time.perf_counter()
        late = sum(waited[len(waited) // 20 + 1 :]) / (now - begin)  # without warm-up
        spent = cpu_seconds() - cpu
        print(json.dumps({"seconds": now - begin, "steps": steps, "wait": late, "cpu": spent}), flush=True)
        sys.stdin.readline()  # until the parent has counted what was sent
        begin = time.perf_counter()


def measure(
    python: str, library: str, kind: str, folder: Path, cache_bytes: int, step_seconds: float, server: Any, limit: float
) -> dict[str, Any]:
    """Two epochs in a process of their own: seconds, bytes fetched and share of waiting of each."""
    with tempfile.TemporaryDirectory(dir=folder) as cache, tempfile.TemporaryFile() as errors:
        told = ["--child", library, "--kind", kind, "--cache", cache, "--bytes", str(cache_bytes)]
        command = ["timeout", str(limit), python, __file__, *told, "--step-seconds", str(step_seconds)]
        found, before, started = [], server.num_bytes(), 0
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(b'{"started"'):
                    started = server.num_bytes()
                if not line.startswith(b'{"seconds"'):
                    continue
                after = server.num_bytes()
                each = json.loads(line)
                cpu_per_gb = each["cpu"] / max(1, after - started) * 1e9
                found.append({**each, "fetched": after - before, "cpu_per_gb": cpu_per_gb})
                before = after
                process.stdin.write(b"\n")
                process.stdin.flush()
        if len(found) == (1 if library == "obstore" else 2):
            return dict(zip(("first", "second"), found, strict=False))
        if process.returncode == 124:
            return {"failed": f"not done in {limit:.0f} s"}
        errors.seek(0)
        said = errors.read().decode(errors="replace").strip().splitlines()
        reasons = [line for line in said if "Error" in line or "Exists" in line] or said or ["ended"]
        return {"failed": reasons[-1][-200:]}


def predict(plan: Any, cache_bytes: int, bandwidth: float, step_seconds: float) -> dict[str, Any]:
    """What the simulator says of Penstock's run."""
    found = plan.egress(cache_bytes=cache_bytes, bandwidth=bandwidth, step_seconds=step_seconds or 1e-9)
    steps = found.epoch_steps * step_seconds
    return {
        name: {"fetched": epoch.node_bytes, "lru": epoch.lru_bytes, "seconds": steps + (epoch.waited_seconds or 0.0)}
        for name, epoch in zip(("first", "second"), found.epochs, strict=True)
    }


def tell(figures: dict[str, Any], data_bytes: int, bandwidth: float) -> str:
    """One line: shares of the floor, of the data, of waiting."""
    if "failed" in figures:
        return figures["failed"]
    told = [f"CPU {figures['first']['cpu_per_gb']:.2f} s/GB"] if "cpu_per_gb" in figures["first"] else []
    for name in ("first", "second"):
        if (each := figures.get(name)) is not None:
            floor = data_bytes / bandwidth / max(each["seconds"], 1e-9)
            said = f"{name}: {each['seconds']:.1f} s, {floor:.2f} of floor, fetched {each['fetched'] / data_bytes:.2f}"
            said += f", LRU {each['lru'] / data_bytes:.2f}" if "lru" in each else ""
            told.append(said + (f", wait {each['wait']:.3f}" if "wait" in each else ""))
    return "; ".join(told)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="", help="interpreter of an environment with mosaicml-streaming and litdata")
    parser.add_argument("--kinds", nargs="+", default=["tokens", "images"])
    parser.add_argument("--libraries", nargs="+", default=LIBRARIES)
    parser.add_argument("--caches", nargs="+", type=float, default=[1.1, 0.5, 0.1], help="shares of the data")
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--shard-megabytes", type=int, default=2)
    parser.add_argument("--bandwidth", type=float, default=32e6)
    parser.add_argument("--latency", type=float, default=0.03)
    parser.add_argument("--need", type=float, default=0.0, help="share of the bandwidth that training needs")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds for two epochs")
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

    pythons = {name: sys.executable if name in ("penstock", "obstore") else given.peers for name in given.libraries}
    results: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(s3lite.serve(root / "s3"))
        os.environ.update(server.environment, S3_ENDPOINT_URL=server.endpoint, AWS_DEFAULT_REGION="eu-west-1")
        for kind in given.kinds:
            sizes = {}
            for library, python in pythons.items():
                folder = root / "s3" / "bucket" / f"{'penstock' if library == 'obstore' else library}-{kind}"
                told = ["--write", library, "--kind", kind, "--cache", str(folder), "--megabytes", str(given.megabytes)]
                told += ["--shard-megabytes", str(given.shard_megabytes)]
                subprocess.run([python, __file__, *told], check=True)
                sizes[library] = sum(path.stat().st_size for path in folder.iterdir())
            mean = 2 * ROW if kind == "tokens" else 100_000
            step = BATCH[kind] * mean / (given.need * given.bandwidth) if given.need else 0.0
            for share in given.caches:
                runs = {}
                for library, python in pythons.items():
                    size = sizes[library]
                    if library == "obstore" and share != given.caches[0]:
                        continue
                    server.behave(bandwidth=given.bandwidth, latency_seconds=given.latency)
                    runs[library] = measure(python, library, kind, root, int(share * size), step, server, given.limit)
                    if library == "penstock":
                        plan = plan_of(str(root / "s3" / "bucket" / f"penstock-{kind}"), kind)
                        runs["predicted"] = predict(plan, int(share * size), given.bandwidth, step)
                for name, found in runs.items():
                    results[f"{kind}, cache {share:.0%}, {name}"] = found
                    said = tell(found, sizes.get(name, sizes["penstock"]), given.bandwidth)
                    print(f"{kind:<8} cache {share:>4.0%} {name:<10} {said}", flush=True)
    names = ("megabytes", "shard_megabytes", "bandwidth", "latency", "need")
    settings = {name: getattr(given, name) for name in names}
    print_result("How fast is training from object storage?", settings, results, "obstore", "torch")


if __name__ == "__main__":
    main()

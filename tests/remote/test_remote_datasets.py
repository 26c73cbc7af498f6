"""A dataset in an object store reads like the same one in a folder, whatever the store, the cache and processes do."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock
import s3lite
from filesystem.disks import mounted_disk
from penstock.cli import main
from penstock.errors import DatasetChanged, ObjectMissing, StageError, StorageError, StoreError
from penstock.plan import _epochs
from waiting import wait_until

pytest.importorskip("obstore", reason="pip install 'penstock-data[s3]'")
URL = "s3://bucket/corpus"
NUM_SAMPLES, SHARD_BYTES = 600, 256 << 10


def write(path: Path, seed: int = 1, **options: Any) -> None:
    rng = np.random.default_rng(seed)
    schema = {"tokens": "uint16[*]", "x": "int64", "vector": "float32[64]"}
    with penstock.DatasetWriter(path, schema, shard_bytes=SHARD_BYTES, **options) as writer:
        for number in range(NUM_SAMPLES):
            tokens = rng.integers(0, 60_000, int(rng.integers(1, 4_000))).astype(np.uint16)
            writer.write({"tokens": tokens, "x": number, "vector": rng.random(64, np.float32)})


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("original") / "corpus"
    write(path)
    return path


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[s3lite.Server]:
    with s3lite.serve(tmp_path_factory.mktemp("remote") / "s3") as server:
        yield server


@pytest.fixture
def server(running: s3lite.Server, original: Path, monkeypatch: pytest.MonkeyPatch) -> s3lite.Server:
    running.behave()
    shutil.rmtree(running.root / "bucket" / "corpus", ignore_errors=True)
    shutil.copytree(original, running.root / "bucket" / "corpus")
    for name, value in running.environment.items():
        monkeypatch.setenv(name, value)
    return running


class Watched:
    """What was asked of the server since it was made."""

    def __init__(self, server: s3lite.Server) -> None:
        self._server, self._before = server, server.num_bytes(name="shard-")
        self._requests = len(server.requests())

    @property
    def shard_bytes(self) -> int:
        return self._server.num_bytes(name="shard-") - self._before

    @property
    def requests(self) -> list[s3lite.Request]:
        return self._server.requests()[self._requests :]


def opened(tmp_path: Path, **options: Any) -> penstock.Dataset:
    return penstock.open(URL, cache=tmp_path / "cache", **options)


def cached_bytes(tmp_path: Path) -> int:
    found = 0
    for path in (tmp_path / "cache").rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # evicted since
            found += path.stat().st_size if path.is_file() else 0
    return found


def deleted_bytes(tmp_path: Path) -> int:
    """Bytes of files of the cache that have no name any more, and are still open or mapped in this process."""
    sizes = {}
    for link in [*Path("/proc/self/fd").iterdir(), *Path("/proc/self/map_files").iterdir()]:
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(link).startswith(f"{tmp_path}/cache/") and os.readlink(link).endswith(" (deleted)"):
                sizes[link.stat().st_ino] = link.stat().st_size
    return sum(sizes.values())


def assert_holds(tmp_path: Path, budget: int) -> None:
    """What is without a name counts, too; but not for the moment in which a reader finds that it opened such a file."""
    assert wait_until(lambda: cached_bytes(tmp_path) + deleted_bytes(tmp_path) <= budget)


def assert_equal(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(expected[name]), err_msg=name)


def assert_same_tokens(found: penstock.Dataset, expected: penstock.Dataset) -> None:
    ours, theirs = found[:]["tokens"], expected[:]["tokens"]
    np.testing.assert_array_equal(ours.offsets, theirs.offsets)
    np.testing.assert_array_equal(ours.values, theirs.values)


def fetcher_pid() -> int:
    from penstock.remote import _client

    assert _client._own.crew is not None
    (worker,) = _client._own.crew._workers
    assert worker.pid is not None
    return worker.pid


def test_opening_asks_for_the_manifest_alone(server: s3lite.Server, tmp_path: Path, original: Path) -> None:
    watched = Watched(server)
    dataset = opened(tmp_path)
    assert [(each.method, each.name) for each in watched.requests] == [("GET", "bucket/corpus/manifest.json")]
    local = penstock.open(original)
    assert (len(dataset), dataset.schema, dataset.fingerprint) == (len(local), local.schema, local.fingerprint)


def test_every_sample_is_the_local_one_and_every_shard_is_fetched_once(
    server: s3lite.Server, tmp_path: Path, original: Path
) -> None:
    watched, local = Watched(server), penstock.open(original)
    dataset = opened(tmp_path)
    for index in np.random.default_rng(0).permutation(NUM_SAMPLES)[:100].tolist():
        assert_equal(dataset[index], local[index])
    assert_same_tokens(dataset, local)
    assert watched.shard_bytes == local.storage.num_bytes
    again = Watched(server)
    assert_equal(opened(tmp_path)[5], local[5])
    assert again.shard_bytes == 0


def test_one_sample_costs_one_shard(server: s3lite.Server, tmp_path: Path) -> None:
    watched = Watched(server)
    assert int(opened(tmp_path)[NUM_SAMPLES - 1]["x"]) == NUM_SAMPLES - 1
    assert 0 < watched.shard_bytes <= 2 * SHARD_BYTES


@pytest.mark.parametrize(("num_workers", "workers"), [(0, None), (2, "thread"), (2, "process")])
def test_loaders_give_the_local_batches_and_fetch_all_of_it_once(
    num_workers: int, workers: Any, server: s3lite.Server, tmp_path: Path, original: Path
) -> None:
    local = penstock.open(original)
    plan = opened(tmp_path).select_columns(["x", "vector"]).shuffle(3, group=2).batch(32)
    expected = local.select_columns(["x", "vector"]).shuffle(3, group=2).batch(32)
    assert plan.fingerprint == expected.fingerprint
    watched = Watched(server)
    options = {} if workers is None else {"workers": workers}
    with penstock.DataLoader(plan, num_workers=num_workers, **options) as loader:
        for epoch in range(2):
            for step, batch in enumerate(loader):
                assert_equal(batch, expected.read(step, epoch))
    assert watched.shard_bytes == local.storage.num_bytes


def test_a_cache_smaller_than_the_data_holds_its_budget(
    server: s3lite.Server, tmp_path: Path, original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_epochs, "STORAGE_WINDOW_BYTES", 4 << 10)
    local = penstock.open(original)
    budget = local.storage.num_bytes * 6 // 10
    plan = opened(tmp_path, cache_bytes=budget).select_columns(["x"]).batch(20)
    largest, seen = 0, []
    with penstock.DataLoader(plan, num_workers=2, workers="thread", prefetch_factor=1) as loader:
        for _ in range(2):
            for batch in loader:
                seen.extend(batch["x"].tolist())
                largest = max(largest, cached_bytes(tmp_path))
                assert_holds(tmp_path, budget)
    assert seen == 2 * list(range(NUM_SAMPLES))
    assert largest <= budget


@pytest.mark.parametrize("seed", range(4))
def test_readers_that_share_too_small_a_cache_wait_for_each_other_and_not_for_ever(
    seed: int, server: s3lite.Server, tmp_path: Path, original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch takes several shards, and the cache has no room for those of all batches that are computed at once."""
    monkeypatch.setattr(_epochs, "STORAGE_WINDOW_BYTES", 64 << 10)
    rng, local = random.Random(seed), penstock.open(original)
    budget = int(local.storage.num_bytes * rng.uniform(0.75, 0.95))
    size, group = rng.choice([4, 6]), 1
    plan = opened(tmp_path, cache_bytes=budget).shuffle(seed, group=group).batch(size)
    expected = local.shuffle(seed, group=group).batch(size)
    with penstock.DataLoader(plan, num_workers=4, workers="thread", prefetch_factor=4) as loader:
        for epoch in range(2):
            for step, batch in enumerate(loader):
                np.testing.assert_array_equal(batch["x"], expected.read(step, epoch)["x"])
                assert_holds(tmp_path, budget)


def test_a_shard_that_is_gone_when_it_is_opened_holds_nothing_that_its_reader_had(
    original: Path, tmp_path: Path
) -> None:
    shutil.copytree(original, tmp_path / "copy")
    dataset = penstock.open(tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy")

    def read() -> weakref.ref[object]:
        mine = threading.Event()  # stands for a shard that this reader has open
        with contextlib.suppress(DatasetChanged):
            dataset[0]
        return weakref.ref(mine)

    gc.disable()
    try:
        assert read()() is None
    finally:
        gc.enable()


def test_torch_workers_that_are_forked_read_it(server: s3lite.Server, tmp_path: Path, original: Path) -> None:
    dataset = opened(tmp_path).select_columns(["x", "vector"])
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=50, num_workers=2, multiprocessing_context="fork", shuffle=True
    )
    found = np.concatenate([batch["x"].numpy() for batch in loader])
    assert sorted(found.tolist()) == list(range(NUM_SAMPLES))


@pytest.mark.parametrize(
    "behaviour",
    [
        {"busy_every": 3},
        {"reset_every": 3, "match": "shard-"},
        {"short_every": 3, "match": "shard-"},
        {"flip_every": 2, "match": "shard-"},
        {"stall_every": 7, "match": "shard-"},
    ],
    ids=lambda behaviour: next(iter(behaviour)),
)
def test_what_goes_wrong_on_the_way_changes_no_sample(
    behaviour: dict[str, Any], server: s3lite.Server, tmp_path: Path, original: Path
) -> None:
    server.behave(**behaviour)
    local = penstock.open(original)
    assert_same_tokens(opened(tmp_path), local)


def test_a_fetcher_that_is_killed_is_replaced_and_goes_on_with_what_is_there(
    server: s3lite.Server, tmp_path: Path, original: Path
) -> None:
    server.behave(latency_seconds=0.05)
    local = penstock.open(original)
    dataset = opened(tmp_path)
    watched = Watched(server)
    for index in range(0, NUM_SAMPLES, 60):
        os.kill(fetcher_pid(), signal.SIGKILL)
        assert_equal(dataset[index], local[index])
    assert_same_tokens(dataset, local)
    assert watched.shard_bytes <= 1.1 * local.storage.num_bytes


def test_a_file_that_a_killed_fetcher_left_half_is_finished(
    server: s3lite.Server, tmp_path: Path, original: Path
) -> None:
    dataset = opened(tmp_path)
    (folder,) = {path.parent for path in (tmp_path / "cache").rglob("manifest.json")}
    name = sorted(path.name for path in original.glob("shard-*"))[0]
    content = bytearray((original / name).read_bytes())
    content[-1000:] = bytes(1000)
    (folder / f"part-{name}").write_bytes(content)
    watched = Watched(server)
    assert_equal(dataset[0], penstock.open(original)[0])
    assert watched.shard_bytes < len(content)
    assert (folder / name).read_bytes() == (original / name).read_bytes()


def test_a_dataset_that_was_replaced_says_so(server: s3lite.Server, tmp_path: Path) -> None:
    dataset = opened(tmp_path)
    assert int(dataset[0]["x"]) == 0
    shutil.rmtree(server.root / "bucket" / "corpus")
    write(server.root / "bucket" / "corpus", seed=2)
    with pytest.raises(DatasetChanged, match=r"replaced or removed since it was opened\. Open it again"):
        dataset[NUM_SAMPLES - 1]
    assert opened(tmp_path).fingerprint != dataset.fingerprint


def test_a_shard_that_is_damaged_in_the_store_is_named(server: s3lite.Server, tmp_path: Path) -> None:
    shard = sorted((server.root / "bucket" / "corpus").glob("shard-*"))[0]
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    with pytest.raises(penstock.errors.CorruptionError, match=rf"{shard.name}: bytes .* `penstock push` it again"):
        opened(tmp_path)[:]


def test_a_missing_object_is_named(server: s3lite.Server, tmp_path: Path) -> None:
    shard = sorted((server.root / "bucket" / "corpus").glob("shard-*"))[1]
    shard.unlink()
    with pytest.raises(ObjectMissing, match=rf"{shard.name}: the store has no such object"):
        opened(tmp_path)[:]


@pytest.mark.parametrize(
    ("refusal", "reason"),
    [
        ("ExpiredToken", "credentials have expired"),
        ("InvalidAccessKeyId", "does not know these credentials"),
        ("SignatureDoesNotMatch", "secret key does not belong"),
        ("RequestTimeTooSkewed", "clock is wrong"),
        ("NoSuchBucket", "no such bucket"),
        ("AccessDenied", "access is denied"),
    ],
)
@pytest.mark.parametrize("refuse_after", [0, 1], ids=["at open", "half-way"])
def test_a_refusal_is_one_plain_sentence(
    refusal: str, reason: str, refuse_after: int, server: s3lite.Server, tmp_path: Path
) -> None:
    server.behave(refusal=refusal, refuse_after=refuse_after)
    with pytest.raises(StoreError, match=reason):
        opened(tmp_path)[0]


def test_nothing_there_is_said_with_the_url(server: s3lite.Server, tmp_path: Path) -> None:
    with pytest.raises(ObjectMissing, match=r"s3://bucket/nothing: no dataset is there \(manifest.json is missing\)"):
        penstock.open("s3://bucket/nothing", cache=tmp_path / "cache")


def test_a_budget_below_one_shard_is_refused_at_open(server: s3lite.Server, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"the largest file has [\d,]+ bytes.*Give cache_bytes=[\d,]+ or more"):
        opened(tmp_path, cache_bytes=100_000)


def test_a_budget_below_what_an_order_needs_is_refused_with_the_number_that_would_do(
    server: s3lite.Server, tmp_path: Path, original: Path
) -> None:
    size = penstock.open(original).storage.num_bytes
    plan = opened(tmp_path, cache_bytes=size // 2).select_columns(["x"]).shuffle(1, mode="full").batch(8)
    said = pytest.raises(StorageError, match=rf"needs {size:,} bytes of shards .* Give cache_bytes=")
    with penstock.DataLoader(plan, num_workers=0) as loader, said:
        next(iter(loader))


def test_packing_without_stored_counts_is_refused_before_anything_is_fetched(
    server: s3lite.Server, tmp_path: Path
) -> None:
    watched = Watched(server)
    with pytest.raises(StageError, match=r"Prepare it with pack=1024"):
        opened(tmp_path).pack(1024)
    assert watched.shard_bytes == 0


def test_a_plan_file_names_the_url_and_no_secret(server: s3lite.Server, tmp_path: Path) -> None:
    plan = opened(tmp_path).select_columns(["x"]).shuffle(1).batch(8)
    text = plan.to_toml()
    assert URL in text
    assert s3lite.SECRET_KEY not in text
    (tmp_path / "plan.toml").write_text(text)
    assert_equal(penstock.load_plan(tmp_path / "plan.toml").read(3), plan.read(3))


def test_a_cache_on_a_network_is_refused(
    server: s3lite.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.remote import Cache, _cache

    monkeypatch.setattr(_cache, "is_network_filesystem", lambda _: True)
    with pytest.raises(StorageError, match=r"is on a network .* Give a folder on a disk of this node"):
        Cache(tmp_path / "cache")


def test_what_readers_have_open_counts_until_they_close_it(
    server: s3lite.Server, tmp_path: Path, original: Path
) -> None:
    """Eviction takes a file's name at once, and its bytes when the last reader has closed it, which is soon."""
    size = penstock.open(original).storage.num_bytes
    dataset = opened(tmp_path, cache_bytes=size * 6 // 10).select_columns(["x"])
    for index in range(0, NUM_SAMPLES, 10):
        assert int(dataset[index]["x"]) == index
        assert cached_bytes(tmp_path) <= size * 6 // 10
    wait_until(lambda: not list((tmp_path / "cache").rglob("gone-*")) or cached_bytes(tmp_path) <= size * 6 // 10)


def test_options_of_local_files_are_refused_for_urls(tmp_path: Path, original: Path) -> None:
    with pytest.raises(ValueError, match="leave out dtype="):
        penstock.open(URL, dtype="uint16")
    with pytest.raises(ValueError, match="cache= and cache_bytes= are for URLs"):
        penstock.open(original, cache=tmp_path)


def test_the_verbs_take_a_url(
    server: s3lite.Server,
    tmp_path: Path,
    original: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("JOBSCRATCH", "SLURM_TMPDIR", "LOCAL_SCRATCH", "SCRATCH_LOCAL", "TMPDIR", "SCRATCH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["inspect", URL, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["path"], shown["samples"]) == (URL, NUM_SAMPLES)
    assert main(["cache", "--json"]) == 0
    (kept,) = json.loads(capsys.readouterr().out)["datasets"]
    assert (kept["url"], kept["bytes"] > 0) == (URL, True)
    assert main(["cache", "--clear", URL]) == 0
    assert "freed" in capsys.readouterr().out
    assert main(["verify", URL, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes"] == penstock.open(original).storage.num_bytes
    shard = sorted((server.root / "bucket" / "corpus").glob("shard-*"))[2]
    shard.write_bytes(bytes(len(shard.read_bytes())))
    assert main(["verify", URL]) == 1
    assert shard.name in capsys.readouterr().out
    assert cached_bytes(tmp_path / "penstock") == 0


def test_statistics_say_what_was_fetched(server: s3lite.Server, tmp_path: Path, original: Path) -> None:
    os.kill(fetcher_pid(), signal.SIGKILL)  # counts are of a process's fetcher
    plan = opened(tmp_path).shuffle(3).batch(32)
    with penstock.DataLoader(plan, num_workers=1, workers="thread") as loader:
        assert len(list(loader)) > 0
        found = loader.stats()
    assert found.fetched_bytes == penstock.open(original).storage.num_bytes
    assert found.num_fetched == len(penstock.open(original).storage.manifest.shards)
    assert "fetched" in str(found)


READER = """
import sys, numpy as np, penstock
if __name__ == "__main__":
    dataset = penstock.open("s3://bucket/corpus", cache=sys.argv[1]).select_columns(["x"])
    order = np.random.default_rng(int(sys.argv[2])).permutation(len(dataset))
    print("ready", flush=True)
    sys.stdin.readline()
    assert [int(dataset[int(index)]["x"]) for index in order] == order.tolist()
    print("done", flush=True)
"""


def readers(tmp_path: Path, count: int) -> list[subprocess.Popen[str]]:
    (tmp_path / "reader.py").write_text(READER)
    started = []
    for number in range(count):
        command = [sys.executable, tmp_path / "reader.py", tmp_path / "cache", str(number)]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.close()
    return started


def test_four_processes_download_once(server: s3lite.Server, tmp_path: Path, original: Path) -> None:
    server.behave(latency_seconds=0.02)
    watched = Watched(server)
    for process in readers(tmp_path, 4):
        assert process.stdout is not None
        with process:
            assert process.stdout.readline() == "done\n"
    assert watched.shard_bytes == penstock.open(original).storage.num_bytes


@pytest.mark.stress
def test_any_process_may_be_killed_at_any_time_and_nothing_needs_cleaning_up(
    server: s3lite.Server, tmp_path: Path, original: Path
) -> None:
    server.behave(bandwidth=4 << 20, latency_seconds=0.02)
    rng, watched = random.Random(1), Watched(server)
    for number in range(20):
        victims = readers(tmp_path, 2)
        time.sleep(rng.uniform(0.0, 0.4))
        victim = rng.choice(victims)
        chosen = rng.choice([victim.pid, *children_of(victim.pid)])
        os.kill(chosen, signal.SIGKILL)
        for process in victims:
            assert process.stdout is not None
            with process:
                said = process.stdout.readline()
            assert said == "done\n" or process is victim, number
    assert watched.shard_bytes <= 1.5 * penstock.open(original).storage.num_bytes
    before = Watched(server)
    assert_same_tokens(opened(tmp_path), penstock.open(original))
    assert before.shard_bytes == 0


def children_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def write_small_shards(path: Path, num_shards: int) -> penstock.Dataset:
    with penstock.DatasetWriter(path, {"x": "int64", "vector": "float32[256]"}, shard_bytes=8 << 10) as writer:
        while len(list(path.parent.rglob("shard-*"))) < num_shards:
            writer.write_batch({"x": np.arange(64), "vector": np.random.default_rng(0).random((64, 256), np.float32)})
    return penstock.open(path)


def test_stalled_requests_are_asked_a_second_time_and_not_given_up(server: s3lite.Server, tmp_path: Path) -> None:
    """Giving one up would count as a retry, after ten seconds of silence; asking twice takes one."""
    local = write_small_shards(server.root / "bucket" / "small", 60)
    with contextlib.suppress(ProcessLookupError):
        os.kill(fetcher_pid(), signal.SIGKILL)  # counts are of a process's fetcher
    dataset = penstock.open("s3://bucket/small", cache=tmp_path / "cache")
    server.behave(stall_every=25, match="shard-", stall_seconds=75)
    np.testing.assert_array_equal(dataset[:]["vector"], local[:]["vector"])
    counts = dataset.storage.supply.read_counts()  # type: ignore[union-attr]
    assert (counts["num_hedged"], counts["num_retries"]) == (len(local.storage.manifest.shards) // 25, 0)


@pytest.mark.stress
def test_each_of_500_damaged_ranges_is_noticed(server: s3lite.Server, tmp_path: Path) -> None:
    local = write_small_shards(server.root / "bucket" / "many", 600)
    dataset = penstock.open("s3://bucket/many", cache=tmp_path / "cache")
    server.behave(flip_every=2, match="shard-")
    watched = Watched(server)
    np.testing.assert_array_equal(dataset[:]["vector"], local[:]["vector"])
    assert sum(each.fault == "flip" for each in watched.requests) >= 500
    server.behave()
    assert penstock.verify("s3://bucket/many").is_sound
    for path in (server.root / "bucket" / "many").glob("shard-*"):
        (kept,) = (tmp_path / "cache").rglob(path.name)
        assert kept.read_bytes() == path.read_bytes()


def test_a_full_disk_makes_room_and_is_named_when_there_is_none(
    server: s3lite.Server, tmp_path: Path, original: Path
) -> None:
    local = penstock.open(original)
    with mounted_disk(tmp_path / "disk", 8 << 20) as disk:
        dataset = penstock.open(URL, cache=disk / "cache", cache_bytes=1 << 30).select_columns(["x"])
        ballast, free = disk / "ballast", shutil.disk_usage(disk).free
        ballast.write_bytes(bytes(free - SHARD_BYTES // 4))
        with pytest.raises(StorageError, match=r"No space left on device \(reserving [\d,]+ bytes for the cache\)\."):
            dataset[0]
        os.truncate(ballast, free - 3 * SHARD_BYTES)
        assert [int(dataset[index]["x"]) for index in range(0, NUM_SAMPLES, 25)] == list(range(0, NUM_SAMPLES, 25))
        assert len(list(disk.rglob("shard-*"))) < len(local.storage.manifest.shards)
        del dataset  # so that the disk can be taken away
        gc.collect()


DDP = """
import json, sys, torch, penstock
from torch import distributed, nn
if __name__ == "__main__":
    rank, folder = int(sys.argv[1]), sys.argv[2]
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    plan = penstock.open("s3://bucket/small", cache=f"{folder}/node{rank}").shuffle(5, lanes=2, group=1).batch(64)
    model = nn.parallel.DistributedDataParallel(nn.Linear(256, 1))
    seen = []
    with penstock.DataLoader(plan, num_workers=1, workers="thread") as loader:
        for epoch in range(2):
            for batch in loader:
                model(batch["vector"]).sum().backward()
                seen += batch["x"].tolist()
    print(json.dumps(seen))
    distributed.destroy_process_group()
"""


@pytest.mark.stress
def test_two_ranks_with_a_cache_each_fetch_the_data_once_between_them(
    server: s3lite.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    local = write_small_shards(server.root / "bucket" / "small", 100)
    (tmp_path / "ddp.py").write_text(DDP)
    watched = Watched(server)
    started = [
        subprocess.Popen([sys.executable, tmp_path / "ddp.py", str(rank), tmp_path], stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    seen = [json.loads(process.communicate(timeout=120)[0].splitlines()[-1]) for process in started]
    assert sorted([*seen[0], *seen[1]]) == sorted(2 * local[:]["x"].tolist())
    assert watched.shard_bytes <= 1.02 * local.storage.num_bytes


def test_two_nodes_with_lanes_fetch_the_data_once_between_them(
    server: s3lite.Server, tmp_path: Path, original: Path
) -> None:
    watched, seen = Watched(server), []
    for rank in range(2):
        plan = penstock.open(URL, cache=tmp_path / f"node{rank}").shuffle(5, lanes=2).batch(8, tail="drop")
        with penstock.DataLoader(plan, num_workers=0, rank=rank, world_size=2) as loader:
            for _ in range(2):
                seen += [x for batch in loader for x in batch["x"].tolist()]
    assert len(set(seen)) >= NUM_SAMPLES - 8
    size = penstock.open(original).storage.num_bytes
    assert watched.shard_bytes <= size * 1.35  # ten shards: what lies between two lanes is read by both

"""Many shards, many threads, forks: what is open stays bounded and what is read stays right."""

from __future__ import annotations

import gc
import os
import pickle
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.errors import DatasetChanged, FormatError
from penstock.shards import ShardFolder
from penstock.shards._open_shards import OPEN_FILES

from .strategies import scratch, shard_paths

IOS = ("map", "pread")
NUM_SHARDS = 2000


@pytest.fixture(scope="module")
def many() -> Iterator[Path]:
    """2,000 shards of two samples each: sample i is i, i repeated i % 5 times, and i as text."""
    with scratch() as folder:
        columns = {"x": "int64[2]", "r": "uint16[*]", "b": "bytes"}
        with penstock.DatasetWriter(folder / "ds", columns, shard_bytes=110) as writer:
            writer.write_batch({name: [sample(i)[name] for i in range(2 * NUM_SHARDS)] for name in columns})
        assert len(shard_paths(folder / "ds")) >= NUM_SHARDS
        yield folder / "ds"


@pytest.fixture
def few_open_files(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(OPEN_FILES, "limit", 16)
    return 16


def sample(index: int) -> dict[str, Any]:
    return {"x": [index, -index], "r": [index] * (index % 5), "b": f"{index:05}".encode()}


def assert_read(found: dict[str, Any], indices: Any) -> None:
    wanted = [sample(index) for index in np.asarray(indices).tolist()]
    assert found["x"].tolist() == [each["x"] for each in wanted]
    assert [row.tolist() for row in found["r"]] == [each["r"] for each in wanted]
    assert list(found["b"]) == [each["b"] for each in wanted]


def num_descriptors(path: Path) -> int:
    """Descriptors of this process that lead to a dataset."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{name}").startswith(str(path))
        except FileNotFoundError:
            continue
    return count


@pytest.mark.parametrize("io", IOS)
def test_descriptors_stay_bounded_with_many_shards(io: Any, many: Path, few_open_files: int) -> None:
    ds = penstock.open(many, io=io)
    rng = np.random.default_rng(0)
    most = 0
    for _ in range(12):
        indices = rng.integers(0, len(ds), 50)
        assert_read(ds.read(indices), indices)
        index = int(indices[0])
        assert ds[index]["x"].tolist() == sample(index)["x"]
        most = max(most, num_descriptors(many))
    assert 0 < most <= few_open_files + 1
    del ds
    gc.collect()
    assert num_descriptors(many) == 0


@pytest.mark.stress
@pytest.mark.parametrize("io", IOS)
def test_a_read_over_hundreds_of_shards_needs_no_more_descriptors(io: Any, many: Path, few_open_files: int) -> None:
    ds = penstock.open(many, io=io)
    most, done = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.005):
            most = max(most, num_descriptors(many))

    watcher = threading.Thread(target=watch, name="watch")
    watcher.start()
    try:
        assert_read(ds[:1000], np.arange(1000))
        assert ds.lengths("r").tolist() == [index % 5 for index in range(len(ds))]
    finally:
        done.set()
        watcher.join()
    assert 0 < most <= 3 * few_open_files


@pytest.mark.parametrize("of", ["lengths", "packing"])
def test_a_pass_over_more_shards_than_may_be_open_opens_each_once(
    of: str, many: Path, few_open_files: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: Counter[str] = Counter()
    really_open = os.open

    def count(path: Any, *args: Any, **more: Any) -> int:
        if Path(path).name.startswith("shard-"):
            opened[Path(path).name] += 1
        return really_open(path, *args, **more)

    ds = penstock.open(many)
    monkeypatch.setattr(os, "open", count)
    if of == "lengths":
        assert ds.lengths("r").tolist() == [index % 5 for index in range(len(ds))]
        assert num_descriptors(many) == 0
    else:
        assert ds.pack(4, column="r").batch(1).num_batches() == 2 * len(ds) // 4
    assert len(opened) >= NUM_SHARDS
    assert set(opened.values()) == {1}


def test_64_descriptors_are_enough_for_2000_shards(many: Path) -> None:
    code = f"""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
import numpy as np, penstock
ds = penstock.open({str(many)!r})
assert ds.lengths("r").tolist() == [index % 5 for index in range(len(ds))]
assert ds.shuffle(seed=1).pack(4, column="r").batch(8).read(3)["input_ids"].shape == (8, 4)
indices = np.random.default_rng(0).permutation(len(ds))
assert np.array_equal(ds.read(indices)["x"][:, 0], indices)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_bound_holds_over_several_datasets(many: Path, few_open_files: int) -> None:
    sets = [penstock.open(many, io=IOS[place % 2]) for place in range(6)]
    for step in range(15):
        for place, ds in enumerate(sets):
            indices = [(step * 97 + place * 31) % len(ds), (step * 13 + place) % len(ds)]
            assert_read(ds.read(indices), indices)
    assert num_descriptors(many) <= 2 * (few_open_files + 1)


@pytest.mark.parametrize("io", IOS)
@pytest.mark.parametrize("check", ["window", "never"])
def test_threads_read_right_while_shards_are_closed_under_them(
    io: Any, check: Any, many: Path, few_open_files: int
) -> None:
    ds = penstock.open(many, io=io, check=check)

    def work(seed: int) -> int:
        rng = np.random.default_rng(seed)
        for _ in range(6):
            indices = rng.integers(-len(ds), len(ds), 20)
            assert_read(ds.read(indices), indices % len(ds))
            index = int(rng.integers(0, len(ds)))
            assert ds[index]["b"] == sample(index)["b"]
        return 1

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(work, range(8))) == 8


@pytest.mark.parametrize("io", IOS)
def test_a_child_forked_while_threads_read_reads_right(io: Any, many: Path, few_open_files: int) -> None:
    ds = penstock.open(many, io=io)
    ds.read([0])
    done = threading.Event()
    threads = [threading.Thread(target=read_until, args=(ds, done, seed), name=f"read-{seed}") for seed in range(3)]
    for thread in threads:
        thread.start()
    try:
        for seed in range(3):
            assert run_in_child(lambda seed=seed: read_some(ds, seed)) == 0
    finally:
        done.set()
        for thread in threads:
            thread.join()
    read_some(ds, 99)


def read_until(ds: penstock.Dataset, done: threading.Event, seed: int) -> None:
    while not done.is_set():
        read_some(ds, seed)


def read_some(ds: penstock.Dataset, seed: int) -> None:
    indices = np.random.default_rng(seed).integers(0, len(ds), 30)
    assert_read(ds.read(indices), indices)
    assert ds[int(indices[0])]["b"] == sample(int(indices[0]))["b"]


def run_in_child(work: Any) -> int:
    """Exit code of a forked child that does `work`; a hang is killed."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    timer = threading.Timer(30, os.kill, (child, 9))
    timer.start()
    try:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        timer.cancel()


def test_a_forked_child_leaves_the_parents_files_alone(many: Path) -> None:
    ds = penstock.open(many)
    ds.read(np.arange(100))
    assert run_in_child(lambda: ds.read(np.arange(300, 400))) == 0
    assert_read(ds.read(np.arange(100)), np.arange(100))


@pytest.mark.parametrize("io", IOS)
def test_views_outlive_the_dataset_and_the_closing_of_their_shard(io: Any, tmp_path: Path, few_open_files: int) -> None:
    rows = np.random.default_rng(0).integers(0, 255, (80, 20_000), np.uint8)
    with penstock.DatasetWriter(tmp_path / "ds", {"x": "uint8[20000]", "r": "uint8[*]"}, shard_bytes=50_000) as writer:
        writer.write_batch({"x": rows, "r": rows})
    ds = penstock.open(tmp_path / "ds", io=io)
    views = [ds[index] for index in range(5)]
    for index in range(80):
        ds[index]
    assert all(not view["x"].flags.writeable for view in views)
    del ds
    gc.collect()
    for file in (tmp_path / "ds").iterdir():
        file.unlink()
    for index, view in enumerate(views):
        assert np.array_equal(view["x"], rows[index])
        assert np.array_equal(view["r"], rows[index])


def test_opening_touches_no_shard(many: Path, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes((many / "manifest.json").read_bytes())
    ds = penstock.open(tmp_path)
    assert len(ds) == 2 * NUM_SHARDS
    assert ds.fingerprint == penstock.open(many).fingerprint
    assert len(pickle.loads(pickle.dumps(ds))) == len(ds)
    for read in (lambda: ds[0], lambda: ds.read([5]), lambda: ds.lengths("r")):
        with pytest.raises(FormatError, match="the shard is missing"):
            read()


def test_a_shard_that_comes_back_is_read(many: Path, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes((many / "manifest.json").read_bytes())
    ds = penstock.open(tmp_path)
    with pytest.raises(FormatError):
        ds[0]
    first = shard_paths(many)[0]
    (tmp_path / first.name).write_bytes(first.read_bytes())
    assert ds[0]["b"] == b"00000"


@pytest.mark.parametrize("io", IOS)
@pytest.mark.parametrize("what", ["moved", "removed", "a file in its place"])
def test_a_dataset_that_went_away_is_said_to_have_gone(tmp_path: Path, io: Any, what: str) -> None:
    path = tmp_path / "ds"
    with penstock.DatasetWriter(path, {"x": "int64"}, shard_bytes=8) as writer:
        writer.write_batch({"x": range(3)})
    ds = penstock.open(path, io=io)
    ds[0]
    path.rename(tmp_path / "elsewhere")
    if what == "removed":
        shutil.rmtree(tmp_path / "elsewhere")
    elif what == "a file in its place":
        path.touch()
    assert ds[0]["x"] == 0  # its shard is open
    with pytest.raises(DatasetChanged, match=r"no dataset is there .* moved or removed after it was opened"):
        ds[len(ds) - 1]


def test_announcing_and_checking_ahead_change_nothing(many: Path) -> None:
    for io in IOS:
        storage = ShardFolder(many, io=io, check="window")
        column = storage.schema["r"]
        storage.will_need(column, 5, 40)
        storage.check_samples(column, 5, 40)
        found = storage.read_ragged(column, np.array([5, 39, 8]))
        assert [row.tolist() for row in found] == [sample(index)["r"] for index in (5, 39, 8)]


@pytest.mark.parametrize("option", ["io", "check"])
def test_a_choice_that_is_none_is_named_with_the_choices(option: str, many: Path) -> None:
    with pytest.raises(ValueError, match=f"{option}='maybe'; the choices are"):
        penstock.open(many, **{option: "maybe"})  # type: ignore[arg-type]

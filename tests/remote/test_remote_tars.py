"""Tars in a store: fetched as whole files into the node's cache, and read from there as tars are read anywhere."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import webdataset

import penstock
import s3lite
from penstock.cli import main
from penstock.errors import DatasetChanged, ObjectMissing, StorageError

URL = "s3://bucket/tars/train-{000..003}.tar"
PER_TAR = 50


def write_tars(folder: Path, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(4):
        with webdataset.TarWriter(str(folder / f"train-{number:03}.tar")) as tar:
            for place in range(PER_TAR):
                index = number * PER_TAR + place
                tar.write({"__key__": f"{index:06}", "jpg": rng.bytes(int(rng.integers(1, 9000))), "cls": index % 7})


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[s3lite.Server]:
    with s3lite.serve(tmp_path_factory.mktemp("remote") / "s3") as server:
        yield server


@pytest.fixture
def server(running: s3lite.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> s3lite.Server:
    running.behave()
    shutil.rmtree(running.root / "bucket" / "tars", ignore_errors=True)
    write_tars(running.root / "bucket" / "tars")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    for name, value in running.environment.items():
        monkeypatch.setenv(name, value)
    return running


def local(server: s3lite.Server) -> penstock.Dataset:
    return penstock.open(server.root / "bucket" / "tars" / "train-{000..003}.tar")


def fetched(server: s3lite.Server) -> int:
    return server.num_bytes(name="train-")


def assert_same(found: penstock.Dataset, expected: penstock.Dataset) -> None:
    order = np.random.default_rng(1).permutation(len(expected))
    assert [dict(each) for each in found.__getitems__(order)] == [dict(each) for each in expected.__getitems__(order)]


def test_tars_by_url_are_those_of_a_folder_and_fetched_once(server: s3lite.Server, tmp_path: Path) -> None:
    before, expected = fetched(server), local(server)
    ds = penstock.open(URL, cache=tmp_path / "cache")
    assert ds.fingerprint == expected.fingerprint
    assert_same(ds, expected)
    assert_same(pickle.loads(pickle.dumps(ds)), expected)
    assert_same(penstock.open(URL, cache=tmp_path / "cache"), expected)
    num_bytes = sum(path.stat().st_size for path in (server.root / "bucket" / "tars").glob("*.tar"))
    assert fetched(server) - before == num_bytes
    assert ds.origin(PER_TAR) == expected.origin(PER_TAR).replace(str(server.root), "s3:/")  # type: ignore[union-attr]


def test_loaders_give_the_local_batches_and_resume_where_others_stopped(server: s3lite.Server, tmp_path: Path) -> None:
    plans = [ds.shuffle(seed=3).batch(8) for ds in (local(server), penstock.open(URL, cache=tmp_path / "cache"))]
    with penstock.DataLoader(plans[0], num_workers=0) as here, penstock.DataLoader(plans[1], num_workers=2) as there:
        batches = zip(iter(here), iter(there), strict=False)
        for _ in range(7):
            one, other = next(batches)
            assert list(one["jpg"]) == list(other["jpg"])
        state = here.state_dict()
    (tmp_path / "plan.toml").write_text(plans[1].to_toml())
    plan = penstock.load_plan(tmp_path / "plan.toml")
    with penstock.DataLoader(plan, num_workers=1) as loader:
        loader.load_state_dict(state)
        assert list(next(iter(loader))["jpg"]) == list(plans[0].read(7)["jpg"])


def test_lanes_of_an_order_are_tars_as_they_are_shards(server: s3lite.Server, tmp_path: Path) -> None:
    ds = penstock.open(URL, cache=tmp_path / "cache")
    plan = ds.shuffle(seed=1, lanes=2, group=1).batch(5)
    assert plan.fingerprint == local(server).shuffle(seed=1, lanes=2, group=1).batch(5).fingerprint
    uses = plan.uses(0, len(ds))
    assert sorted(uses.shard.tolist()) == [0, 1, 2, 3]
    assert uses.last_row[:2].max() < uses.first_row[2:].min()  # two tars at a time, each once


def test_a_cache_smaller_than_the_tars_holds_its_budget(server: s3lite.Server, tmp_path: Path) -> None:
    expected = local(server)
    sizes = [path.stat().st_size for path in (server.root / "bucket" / "tars").glob("*.tar")]
    ds = penstock.open(URL, cache=tmp_path / "cache", cache_bytes=int(2.6 * max(sizes)))
    assert [dict(each) for each in ds] == [dict(each) for each in expected]
    kept = sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*.tar"))
    assert 0 < kept <= int(2.6 * max(sizes))
    with pytest.raises(StorageError, match="the largest file has"):
        penstock.open(URL, cache=tmp_path / "small", cache_bytes=min(sizes) // 2)


def test_a_tar_that_was_replaced_is_read_again_and_the_others_are_not(server: s3lite.Server, tmp_path: Path) -> None:
    cache = {"cache": tmp_path / "cache"}
    before = penstock.open(URL, **cache)
    folder, other = server.root / "bucket" / "tars", tmp_path / "other"
    write_tars(other, seed=9)
    shutil.copy(other / "train-002.tar", folder / "train-002.tar")
    after = penstock.open(URL, **cache)
    assert after.fingerprint != before.fingerprint
    assert_same(after, local(server))
    for path in (tmp_path / "cache").rglob("*.tar"):
        path.unlink()
    with pytest.raises(DatasetChanged):
        before[2 * PER_TAR]


def test_inspect_shows_tars_at_a_url(server: s3lite.Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", URL, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["samples"], found["shards"], found["checksums"]) == (4 * PER_TAR, 4, False)


def test_what_is_not_there_or_cannot_be_named_is_said(server: s3lite.Server, tmp_path: Path) -> None:
    with pytest.raises(ObjectMissing, match=r"train-009\.tar: there is no such object"):
        penstock.open("s3://bucket/tars/train-009.tar", cache=tmp_path / "cache")
    with pytest.raises(ValueError, match="named with braces"):
        penstock.open("s3://bucket/tars/*.tar", cache=tmp_path / "cache")
    with pytest.raises(ValueError, match="only columns= and on_error="):
        penstock.open(URL, dtype="uint8")

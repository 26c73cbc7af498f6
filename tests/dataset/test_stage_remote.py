"""Staging from a store: there, or not there at all, and each byte fetched once, whatever happens on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import penstock
import s3lite
from penstock.cli import main
from penstock.errors import CorruptionError, DatasetExists, IncompleteDataset, StoreError
from waiting import wait_until

pytest.importorskip("obstore", reason="pip install 'penstock-data[s3]'")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[s3lite.Server]:
    (tmp_path / "scratch").mkdir()
    with s3lite.serve(tmp_path / "s3") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server


def write(folder: Path, rows: int = 200, shard_bytes: int = 40_000) -> Path:
    with penstock.DatasetWriter(folder, {"x": "int64[*]"}, shard_bytes=shard_bytes) as writer:
        writer.write_batch({"x": [np.arange(index) for index in range(rows)]})
    (folder / ".lock").unlink(missing_ok=True)
    return folder


@pytest.fixture
def corpus(server: s3lite.Server) -> Path:
    return write(server.root / "bucket" / "corpus")


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    return tmp_path / "scratch"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in (".lock", "run.json")}


def test_a_staged_dataset_is_the_one_in_the_store_and_nothing_else_stays(corpus, scratch, server):
    seen = []
    staged = penstock.stage("s3://bucket/corpus", scratch, on_progress=lambda done, total: seen.append((done, total)))
    assert staged.path == scratch / "corpus"
    assert contents(staged.path) == contents(corpus)
    assert os.listdir(scratch) == ["corpus"]
    assert staged.copied_bytes == sum(map(len, contents(corpus).values())) == seen[-1][0] == seen[-1][1]
    fetched = server.num_bytes()
    assert penstock.stage("s3://bucket/corpus", scratch).copied_bytes == 0
    assert server.num_bytes() - fetched == len(contents(corpus)["manifest.json"])


@pytest.mark.parametrize("fault", ["busy_every", "reset_every", "short_every", "flip_every", "stall_every"])
def test_what_the_line_breaks_damages_or_holds_up_is_fetched_again(fault, scratch, server):
    corpus = write(server.root / "bucket" / "large", rows=3000, shard_bytes=20 << 20)
    server.behave(**{fault: 5}, stall_seconds=60)
    staged = penstock.stage("s3://bucket/large", scratch)
    assert contents(staged.path) == contents(corpus)


def stage_in_a_process(scratch: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "penstock", "stage", "s3://bucket/corpus", str(scratch), "--json"],
        stdout=subprocess.PIPE,
    )


def test_after_kill_9_half_way_there_is_nothing_and_the_next_run_fetches_the_rest(corpus, scratch, server):
    server.behave(bandwidth=60_000)
    data = scratch / ".corpus.staging" / "data"
    with stage_in_a_process(scratch) as process:
        wait_until(lambda: any(path.suffix == ".safetensors" for path in data.glob("*")))
        process.send_signal(signal.SIGKILL)
    assert not (scratch / "corpus").exists()
    kept = {path.name for path in data.glob("*.safetensors")}
    server.behave()
    num_gets = len(server.requests("GET"))
    staged = penstock.stage("s3://bucket/corpus", scratch)
    assert contents(staged.path) == contents(corpus)
    fetched = {each.name.rpartition("/")[2] for each in server.requests("GET")[num_gets:]}
    assert fetched.isdisjoint(kept)


def test_of_four_processes_one_fetches(corpus, scratch, server):
    processes = [stage_in_a_process(scratch) for _ in range(4)]
    said = [process.communicate()[0].decode() for process in processes]
    assert sum('"copied_bytes": 0' in each for each in said) == 3
    shards = [each for each in server.requests("GET", "shard-") if each.num_bytes]
    assert sum(each.num_bytes for each in shards) == sum(path.stat().st_size for path in corpus.glob("shard-*"))
    assert contents(scratch / "corpus") == contents(corpus)


def test_a_damaged_object_is_named_and_never_staged(corpus, scratch):
    shard = min(corpus.glob("shard-*"))
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(CorruptionError, match=rf"s3://bucket/corpus/{shard.name}: bytes .* `penstock push` it again"):
        penstock.stage("s3://bucket/corpus", scratch)
    assert not (scratch / "corpus").exists()


def test_what_cannot_be_staged_is_one_sentence(corpus, scratch, server, capsys):
    with pytest.raises(IncompleteDataset, match=r"s3://bucket/other: no dataset is there"):
        penstock.stage("s3://bucket/other", scratch)
    with pytest.raises(StoreError, match="there is no such bucket"):
        penstock.stage("s3://nosuch/other", scratch)
    (scratch / "corpus").mkdir()
    with pytest.raises(DatasetExists, match="something else is there"):
        penstock.stage("s3://bucket/corpus", scratch)
    server.behave(refusal="ExpiredToken")
    assert main(["stage", "s3://bucket/corpus", str(scratch)]) == 1
    assert "the credentials have expired" in capsys.readouterr().err


def test_a_store_of_fsspec_is_staged_from_as_well(corpus, scratch):
    penstock.push(corpus, "memory://bucket/staged")
    staged = penstock.stage("memory://bucket/staged", scratch)
    assert contents(scratch / "staged") == contents(corpus)
    assert staged.copied_bytes

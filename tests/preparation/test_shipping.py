"""Preparing straight to a store: the bytes of a local preparation, in little room, whatever happens on the way."""

from __future__ import annotations

import json
import os
import shutil
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
from penstock.errors import DatasetExists, StoreError, WriterBusy
from waiting import wait_until

pytest.importorskip("obstore", reason="pip install 'penstock-data[s3]'")

SETTINGS = {"transform": penstock.Tokenize("bytes", column="text"), "shard_bytes": 100_000, "pack": 512, "workers": 1}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "penstock" / "prepare"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[s3lite.Server]:
    with s3lite.serve(tmp_path / "s3") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server


def write_source(path: Path, seed: int, rows: int = 150) -> None:
    rng = np.random.default_rng(seed)
    path.parent.mkdir(exist_ok=True)
    texts = (bytes(rng.integers(97, 122, rng.integers(10, 2000), np.uint8)).decode() for _ in range(rows))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    for seed in range(6):
        write_source(tmp_path / "raw" / f"{seed}.jsonl", seed)
    return tmp_path / "raw"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in (".lock", "run.json")}


def room_of(folder: Path) -> int:
    """Bytes on disk of all shards under a folder."""
    found = 0
    for path in folder.rglob("shard-*"):
        try:
            found += path.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return found


def test_the_store_has_what_a_local_preparation_gives_and_only_hollow_shards_stay(sources, tmp_path, server, cache):
    local = penstock.prepare(sources, tmp_path / "local", **SETTINGS)
    prepared = penstock.prepare(sources, "s3://bucket/corpus", **SETTINGS)
    assert prepared.path == "s3://bucket/corpus"
    assert prepared.num_tokens == local.num_tokens
    assert contents(server.root / "bucket" / "corpus") == contents(tmp_path / "local")
    assert server.requests("PUT")[-1].name.endswith("manifest.json")
    assert room_of(cache) < local.num_bytes / 2
    assert "Sent" in str(prepared)
    num_puts = len(server.requests("PUT"))
    assert "up to date" in str(penstock.prepare(sources, "s3://bucket/corpus", **SETTINGS))
    assert len(server.requests("PUT")) == num_puts


def test_a_slow_network_holds_preparation_up_and_little_room_is_used(sources, tmp_path, server, cache):
    for seed in range(6):
        write_source(sources / f"{seed}.jsonl", seed, rows=400)
    total = penstock.prepare(sources, tmp_path / "local", **SETTINGS).num_bytes
    server.behave(bandwidth=1e6)
    seen = []
    penstock.prepare(sources, "s3://bucket/corpus", **SETTINGS, on_progress=lambda _: seen.append(room_of(cache)))
    assert contents(server.root / "bucket" / "corpus") == contents(tmp_path / "local")
    assert max(seen) < 10 * 120_000 < total / 2


def start(sources: Path, url: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "penstock", "prepare", str(sources), url, "--tokenizer", "bytes", "--column"]
    command += ["text", "--shard-bytes", "100000", "--pack", "512", "--workers", "1"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def test_after_kill_9_the_next_run_neither_prepares_nor_sends_again_what_was_there(sources, tmp_path, server):
    server.behave(bandwidth=4e5)
    folder = server.root / "bucket" / "corpus"
    with start(sources, "s3://bucket/corpus") as process:
        wait_until(lambda: folder.exists() and len(list(folder.iterdir())) >= 3)
        process.send_signal(signal.SIGKILL)
    server.behave()
    before = contents(folder)
    assert not any(name.startswith("manifest") for name in before)
    num_puts = len(server.requests("PUT"))
    prepared = penstock.prepare(sources, "s3://bucket/corpus", **SETTINGS)
    assert prepared.tasks_kept >= 2
    penstock.prepare(sources, tmp_path / "local", **SETTINGS)
    assert contents(folder) == contents(tmp_path / "local")
    sent = {each.name.rpartition("/")[2] for each in server.requests("PUT")[num_puts:] if each.status == 200}
    assert sent.isdisjoint(before)


def stop_half_way(progress: penstock.preparation.Progress) -> None:
    if progress.tasks >= 4:
        raise KeyboardInterrupt


def test_sources_that_change_while_a_run_is_stopped_give_the_right_dataset(sources, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        penstock.prepare(sources, "memory://bucket/changed", **SETTINGS, on_progress=stop_half_way)
    write_source(sources / "00.jsonl", 7)  # sorts before all others, so that every shard gets another name
    prepared = penstock.prepare(sources, "memory://bucket/changed", **SETTINGS)
    penstock.prepare(sources, tmp_path / "local", **SETTINGS)
    assert there("memory://bucket/changed").items() >= contents(tmp_path / "local").items()
    assert prepared.num_samples == 7 * 150


def there(url: str) -> dict[str, bytes]:
    import fsspec

    files = fsspec.filesystem("memory")
    return {path.rpartition("/")[2]: files.cat_file(path) for path in files.ls(url, detail=False)}


def test_sources_are_added_on_another_machine_too(sources, tmp_path, cache):
    for folder in ("memory://bucket/grown", tmp_path / "local"):
        penstock.prepare(sources, folder, **SETTINGS)
    shutil.rmtree(cache)
    write_source(tmp_path / "more.jsonl", 8)
    for folder in ("memory://bucket/grown", tmp_path / "local"):
        prepared = penstock.prepare(tmp_path / "more.jsonl", folder, append=True, **SETTINGS)
        assert prepared.num_samples == 7 * 150
    assert there("memory://bucket/grown").items() >= contents(tmp_path / "local").items()


def test_a_shard_that_the_store_has_lost_is_made_again(sources, tmp_path):
    import fsspec

    penstock.prepare(sources, "memory://bucket/lost", **SETTINGS)
    files, whole = fsspec.filesystem("memory"), there("memory://bucket/lost")
    lost = sorted(whole)[3]
    files.rm_file(f"memory://bucket/lost/{lost}")
    penstock.prepare(sources, "memory://bucket/lost", **SETTINGS)
    for name, content in there("memory://bucket/lost").items():
        (tmp_path / "copy").mkdir(exist_ok=True)
        (tmp_path / "copy" / name).write_bytes(content)
    assert penstock.verify(tmp_path / "copy").is_sound
    assert len(penstock.open(tmp_path / "copy")) == 6 * 150


@pytest.mark.parametrize("more", [{"split": {"val": 0.2}}, {"shuffle": 3}])
def test_splits_and_shuffles_arrive_as_they_are_prepared_locally(more, sources, tmp_path, server):
    penstock.prepare(sources, tmp_path / "local", **SETTINGS, **more)
    penstock.prepare(sources, "s3://bucket/corpus", **SETTINGS, **more)
    for part in ("train", "val") if "split" in more else ("",):
        assert contents(server.root / "bucket" / "corpus" / part) == contents(tmp_path / "local" / part)


def test_a_store_that_refuses_half_way_stops_the_run_and_finished_tasks_are_kept(sources, server, capsys):
    server.behave(refusal="ExpiredToken", refuse_after=16)
    with pytest.raises(StoreError, match="the credentials have expired"):
        penstock.prepare(sources, "s3://bucket/corpus", **SETTINGS)
    server.behave()
    assert penstock.prepare(sources, "s3://bucket/corpus", **SETTINGS).tasks_kept >= 2
    assert penstock.verify(server.root / "bucket" / "corpus").is_sound


def test_a_dataset_that_somebody_else_pushed_meanwhile_is_not_replaced(sources, tmp_path):
    other = penstock.prepare([{"x": 1}] * 3, tmp_path / "other").path
    pushed = []

    def overtake(progress: penstock.preparation.Progress) -> None:
        if progress.tasks and not pushed:
            pushed.append(penstock.push(other, "memory://bucket/rival"))

    with pytest.raises(WriterBusy, match="another push has replaced the dataset there meanwhile"):
        penstock.prepare(sources, "memory://bucket/rival", **SETTINGS, on_progress=overtake)
    assert there("memory://bucket/rival")["manifest.json"] == (Path(other) / "manifest.json").read_bytes()


def test_another_dataset_is_only_replaced_if_asked_and_the_refusal_names_the_url(sources):
    url = "memory://bucket/asked"
    penstock.prepare([{"x": 1}] * 3, url)
    with pytest.raises(DatasetExists, match=r"^memory://bucket/asked: the dataset there was made with a different"):
        penstock.prepare(sources, url, **SETTINGS)
    prepared = penstock.prepare(sources, url, **SETTINGS, overwrite=True)
    assert "1 shard of the dataset before are left there" in str(prepared)


@pytest.mark.parametrize(
    ("url", "options", "reason"),
    [
        ("s3://bucket/corpus", {"engine": "ray"}, "needs a folder that every machine sees"),
        ("https://example.org/corpus", {}, "web servers are only read from"),
        ("s3://me:secret@bucket/corpus", {}, "without user name"),
    ],
)
def test_what_cannot_be_prepared_into_is_refused_before_anything_is_read(url, options, reason, sources):
    with pytest.raises(ValueError, match=reason):
        penstock.prepare(sources, url, **options)


def test_the_verb_takes_a_url(sources, server, capsys):
    assert main(["prepare", str(sources), "s3://bucket/corpus", "--json", "--workers", "1"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["path"] == "s3://bucket/corpus"
    assert os.listdir(server.root / "bucket" / "corpus")

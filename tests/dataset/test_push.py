"""Pushing: the old dataset or the new one, whatever happens on the way; only what is missing is sent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import penstock
import s3lite
from penstock.cli import main
from penstock.errors import CorruptionError, DatasetExists, WriterBusy
from waiting import wait_until

pytest.importorskip("obstore", reason="pip install 'penstock-data[s3]'")


def write(folder: Path, first: int = 0, *, mode: str = "create", rows: int = 200, shard_bytes: int = 40_000) -> Path:
    with penstock.DatasetWriter(folder, {"x": "int64[*]"}, shard_bytes=shard_bytes, mode=mode) as writer:  # type: ignore[arg-type]
        writer.write_batch({"x": [np.arange(first, first + index) for index in range(rows)]})
    return folder


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write(tmp_path / "corpus")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[s3lite.Server]:
    with s3lite.serve(tmp_path / "s3") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def memory(request: pytest.FixtureRequest) -> str:
    return f"memory://bucket/{request.node.name}"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in (".lock", "run.json")}


def test_a_pushed_dataset_is_the_same_dataset_its_manifest_comes_last_and_a_rerun_sends_nothing(corpus, server):
    seen = []
    pushed = penstock.push(corpus, "s3://bucket/corpus/", on_progress=lambda done, total: seen.append((done, total)))
    assert pushed.url == "s3://bucket/corpus"
    assert pushed.num_files == len(contents(corpus))
    assert contents(server.root / "bucket" / "corpus") == contents(corpus)
    assert seen[-1][0] == seen[-1][1]
    puts = server.requests("PUT")
    assert puts[-1].name.endswith("manifest.json")
    assert server.num_bytes("PUT") == pushed.sent_bytes == sum(map(len, contents(corpus).values()))
    assert penstock.push(corpus, "s3://bucket/corpus").sent_bytes == 0
    assert len(server.requests("PUT")) == len(puts)
    write(corpus, 1000, mode="append", rows=20)
    again = penstock.push(corpus, "s3://bucket/corpus")
    assert contents(server.root / "bucket" / "corpus") == contents(corpus)
    assert {each.name.rpartition("/")[2][:12] for each in server.requests("PUT")[len(puts) :]} == {
        "manifest.jso",
        "shard-000005",
    }
    assert again.num_left == 0


def test_what_the_line_breaks_or_damages_is_sent_again(tmp_path, server):
    corpus = write(tmp_path / "large", rows=3000, shard_bytes=20 << 20)
    for number, fault in enumerate(["busy_every", "reset_every", "short_every", "flip_every"]):
        server.behave(**{fault: 4})
        penstock.push(corpus, f"s3://bucket/{number}")
        assert contents(server.root / "bucket" / str(number)) == contents(corpus)
        assert {each.fault for each in server.requests("PUT", f"/{number}/")} > {""}


def test_a_slow_line_only_takes_longer(corpus, server, monkeypatch):
    monkeypatch.setattr("penstock.remote._store._SILENCE_SECONDS", 1)  # in this process, but the child has the same
    server.behave(bandwidth=60_000)
    assert penstock.push(corpus, "s3://bucket/slow").sent_bytes > 180_000


def push_in_a_process(corpus: Path, url: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "penstock", "push", str(corpus), url], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def test_after_kill_9_half_way_there_is_no_dataset_and_the_next_run_sends_the_rest(corpus, server):
    server.behave(bandwidth=60_000)
    with push_in_a_process(corpus, "s3://bucket/corpus") as process:
        wait_until(lambda: any(each.status == 200 for each in server.requests("PUT")))
        process.send_signal(signal.SIGKILL)
        assert process.stderr is not None
        process.stderr.close()
    server.behave()
    folder = server.root / "bucket" / "corpus"
    before = contents(folder)
    assert before
    assert "manifest.json" not in before
    num_puts = len(server.requests("PUT"))
    penstock.push(corpus, "s3://bucket/corpus")
    assert contents(folder) == contents(corpus)
    sent = {each.name.rpartition("/")[2] for each in server.requests("PUT")[num_puts:] if each.status == 200}
    assert sent.isdisjoint(before)


@pytest.mark.stress
@pytest.mark.timeout(600)
def test_twenty_kills_at_any_moment_cost_little_and_no_reader_ever_sees_half(corpus, server):
    penstock.push(corpus, "s3://bucket/corpus")
    folder, old = server.root / "bucket" / "corpus", penstock.open(corpus).fingerprint
    write(corpus, 1000, mode="append", rows=400)
    new, before = penstock.open(corpus).fingerprint, server.num_bytes("PUT")
    server.behave(bandwidth=200_000, latency_seconds=0.05)
    for number in range(20):
        seen = len(server.requests())
        with push_in_a_process(corpus, "s3://bucket/corpus") as process:
            wait_until(lambda: len(server.requests()) >= seen + number or process.poll() is not None)  # noqa: B023
            process.send_signal(signal.SIGKILL)
            assert process.stderr is not None
            process.stderr.close()
        assert penstock.open(folder).fingerprint in (old, new)
        assert penstock.verify(folder).is_sound
    server.behave()
    penstock.push(corpus, "s3://bucket/corpus")
    assert contents(folder).items() >= contents(corpus).items()
    missing = sum(path.stat().st_size for path in corpus.glob("shard-*")) - before
    assert server.num_bytes("PUT") - before < 3 * missing


def test_a_damaged_shard_is_never_sent_and_the_old_dataset_stays(corpus, server):
    penstock.push(corpus, "s3://bucket/corpus")
    old = contents(corpus)
    write(corpus, 1000, mode="append")
    shard = max(corpus.glob("shard-*"))
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(CorruptionError, match=rf"{shard.name}.*was not sent to s3://bucket/corpus"):
        penstock.push(corpus, "s3://bucket/corpus")
    assert not server.requests("PUT", shard.name)
    assert contents(server.root / "bucket" / "corpus").items() >= old.items()


@pytest.mark.parametrize(
    ("behaviour", "url", "sentence"),
    [
        ({}, "s3://nosuch/corpus", "there is no such bucket"),
        ({"refusal": "InvalidAccessKeyId"}, "s3://bucket/corpus", "does not know these credentials"),
        ({"refusal": "ExpiredToken", "refuse_after": 5}, "s3://bucket/corpus", "the credentials have expired. Renew"),
        ({"refusal": "AccessDenied", "refuse_after": 4}, "s3://bucket/corpus", "access is denied. Check the"),
        ({"refusal": "RequestTimeTooSkewed"}, "s3://bucket/corpus", "this machine's clock is wrong"),
    ],
)
def test_a_refusal_is_one_sentence_and_leaves_no_dataset(behaviour, url, sentence, corpus, server, capsys):
    server.behave(**behaviour)
    assert main(["push", str(corpus), url]) == 1
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1
    assert not (server.root / "bucket" / "corpus" / "manifest.json").exists()


def test_of_two_pushes_at_once_the_second_is_refused_and_what_is_there_is_whole(corpus, tmp_path, server):
    penstock.push(corpus, "s3://bucket/corpus")
    rival = tmp_path / "rival"
    subprocess.run(["cp", "-r", str(corpus), str(rival)], check=True)
    write(corpus, 1000, mode="append")
    write(rival, 2000, mode="append")
    has_begun = []

    def overtake(done: int, total: int) -> None:
        if not has_begun:
            has_begun.append(penstock.push(rival, "s3://bucket/corpus"))

    with pytest.raises(WriterBusy, match="another push has replaced the dataset there meanwhile"):
        penstock.push(corpus, "s3://bucket/corpus", on_progress=overtake)
    there = server.root / "bucket" / "corpus"
    assert penstock.open(there).fingerprint == penstock.open(rival).fingerprint
    assert penstock.verify(there).is_sound
    penstock.push(corpus, "s3://bucket/corpus", prune=True)
    assert contents(there) == contents(corpus)


def test_two_pushes_of_the_same_dataset_at_once_both_succeed(corpus, server):
    server.behave(latency_seconds=0.05)
    threads = [threading.Thread(target=penstock.push, args=(corpus, "s3://bucket/corpus")) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert contents(server.root / "bucket" / "corpus") == contents(corpus)


def test_a_store_of_fsspec_is_pushed_to_as_well(corpus, memory):
    import fsspec

    pushed = penstock.push(corpus, memory)
    files = fsspec.filesystem("memory")
    names = {path.rpartition("/")[2]: files.cat_file(path) for path in files.ls(memory, detail=False)}
    assert names == contents(corpus)
    assert "sent 18" in str(pushed)
    assert penstock.push(corpus, memory).sent_bytes == 0


def test_an_unrelated_dataset_is_only_replaced_if_asked_and_its_files_only_deleted_if_asked(corpus, tmp_path, memory):
    import fsspec

    files = fsspec.filesystem("memory")
    penstock.push(corpus, memory)
    files.pipe_file(f"{memory}/notes.txt", b"mine")
    other = write(tmp_path / "other", 5000)
    with pytest.raises(DatasetExists, match=r"another dataset, of 200 samples, is there.*Pass overwrite=True"):
        penstock.push(other, memory)
    replaced = penstock.push(other, memory, overwrite=True)
    assert replaced.num_left == 5
    assert "prune=True" in str(replaced)
    assert penstock.push(other, memory, prune=True).num_pruned == 5
    names = {path.rpartition("/")[2] for path in files.ls(memory, detail=False)}
    assert names == {*contents(other), "notes.txt"}
    files.pipe_file(f"{memory}/manifest.json", b"{}")
    with pytest.raises(DatasetExists, match=r"a manifest\.json that cannot be read is there"):
        penstock.push(other, memory)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://example.org/corpus", "web servers are only read from"),
        ("/mnt/corpus", "is a path. Give a URL"),
        ("s3://me:secret@bucket/corpus", "without user name"),
        ("nosuch://bucket/corpus", "nosuch"),
    ],
)
def test_what_cannot_be_pushed_to_is_refused_before_anything_is_read(url, reason, tmp_path):
    with pytest.raises(ValueError, match=reason):
        penstock.push(write(tmp_path / "corpus", rows=2), url)


def test_the_verb_speaks_json(corpus, server, capsys):
    assert main(["push", str(corpus), "s3://bucket/corpus", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["url"] == "s3://bucket/corpus"
    assert said["sent_bytes"] == server.num_bytes("PUT")


FORKING = """
import os, sys, penstock
from penstock.remote import open_store

penstock.push(sys.argv[1], "s3://bucket/corpus")
child = os.fork()
if child == 0:
    os._exit(0 if open_store("s3://bucket/corpus").head("manifest.json") else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_program_that_has_pushed_can_fork_workers_that_use_obstore_themselves(corpus, server):
    subprocess.run([sys.executable, "-c", FORKING, str(corpus)], check=True, timeout=60, env=dict(os.environ))

"""Staging: there, or not there at all, whatever happens on the way."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import penstock
from penstock.cli import main
from penstock.dataset import _stage
from penstock.errors import CorruptionError, DatasetExists, IncompleteDataset, StorageError
from waiting import wait_until


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    with penstock.DatasetWriter(tmp_path / "net" / "corpus", {"x": "int64[*]"}, shard_bytes=40_000) as writer:
        writer.write_batch({"x": [range(index) for index in range(200)]})
    (tmp_path / "scratch").mkdir()
    return tmp_path / "net" / "corpus"


@pytest.fixture
def scratch(corpus: Path) -> Path:
    return corpus.parents[1] / "scratch"


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_staged_dataset_is_the_same_dataset(corpus, scratch):
    seen = []
    staged = penstock.stage(corpus, scratch, on_progress=lambda done, total: seen.append((done, total)))
    assert staged.path == scratch / "corpus"
    assert staged.copied_bytes > 0
    assert seen[-1][0] == seen[-1][1]
    assert penstock.open(staged.path).fingerprint == penstock.open(corpus).fingerprint
    assert penstock.verify(staged.path).is_sound
    assert names(scratch) == {"corpus"}
    assert names(scratch / "corpus") == names(corpus)
    assert penstock.stage(corpus, scratch).copied_bytes == 0


def test_an_interrupted_copy_is_not_there_and_the_next_run_goes_on(corpus, scratch, monkeypatch):
    def stop(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        penstock.stage(corpus, scratch, on_progress=stop)
    assert not (scratch / "corpus").exists()
    with pytest.raises(IncompleteDataset):
        penstock.open(scratch / "corpus")
    kept = [path for path in (scratch / ".corpus.staging" / "data").iterdir() if path.suffix != ".partial"]
    assert kept
    staged = penstock.stage(corpus, scratch)
    assert 0 < staged.copied_bytes < sum(path.stat().st_size for path in corpus.iterdir())
    assert penstock.verify(staged.path).is_sound


def test_what_was_damaged_on_the_way_is_found_and_copied_again(corpus, scratch, monkeypatch):
    with pytest.raises(ZeroDivisionError):
        penstock.stage(corpus, scratch, on_progress=lambda done, total: 1 / (done < total / 2))
    shard = next((scratch / ".corpus.staging" / "data").glob("shard-*.safetensors"))
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(CorruptionError, match="1 fault in the copy"):
        penstock.stage(corpus, scratch)
    assert not (scratch / "corpus").exists()
    assert penstock.verify(penstock.stage(corpus, scratch).path).is_sound


def test_a_source_that_is_damaged_is_never_staged(corpus, scratch):
    shard = next(corpus.glob("shard-*"))
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    for _ in range(2):
        with pytest.raises(CorruptionError, match="Check the source"):
            penstock.stage(corpus, scratch)
        assert not (scratch / "corpus").exists()


def test_a_scratch_without_room_is_refused_before_anything_is_copied(corpus, scratch, monkeypatch):
    usage = _stage.shutil.disk_usage(scratch)
    monkeypatch.setattr(_stage.shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(StorageError, match="bytes to copy, but only 100 are free"):
        penstock.stage(corpus, scratch)
    assert names(scratch) == set()


def test_a_disk_that_fills_up_half_way_leaves_no_part_of_a_file(corpus, scratch, monkeypatch):
    write, count = os.write, iter(range(1000))

    def fill_up(descriptor: int, piece: memoryview) -> int:
        if next(count) >= 3:
            raise OSError(28, "No space left on device")
        return write(descriptor, piece)

    monkeypatch.setattr(_stage.os, "write", fill_up)
    with pytest.raises(StorageError, match=r"No space left on device \(copied\)\. .* make room"):
        penstock.stage(corpus, scratch)
    monkeypatch.undo()
    assert not (scratch / "corpus").exists()
    assert not list(scratch.rglob("*.partial"))
    assert penstock.verify(penstock.stage(corpus, scratch).path).is_sound


def test_a_read_only_scratch_is_named(corpus, scratch, monkeypatch, capsys):
    def refuse(path: Path) -> bool:
        raise StorageError(30, f"{path}: Read-only file system (creating the folder). Check the path and the disk.")

    monkeypatch.setattr(_stage, "make_directory", refuse)
    assert main(["stage", str(corpus), str(scratch)]) == 1
    assert "Read-only file system" in capsys.readouterr().err


def test_a_folder_that_is_not_there_and_something_else_of_that_name_are_refused(corpus, scratch):
    with pytest.raises(IncompleteDataset, match="no such folder"):
        penstock.stage(corpus, scratch / "nowhere")
    with pytest.raises(IncompleteDataset, match="a file, not a folder"):
        penstock.stage(corpus, corpus / "manifest.json")
    with pytest.raises(IncompleteDataset, match=r"no dataset is there|the folder does not exist"):
        penstock.stage(corpus.parent / "other", scratch)
    with pytest.raises(DatasetExists, match="onto itself"):
        penstock.stage(corpus, corpus.parent)
    with pytest.raises(DatasetExists, match="onto itself"):
        penstock.stage(corpus, corpus / "..")
    with pytest.raises(DatasetExists, match="is the dataset itself, or in it"):
        penstock.stage(corpus, corpus)
    assert not (corpus / corpus.name).exists()
    (scratch / "corpus").mkdir()
    (scratch / "corpus" / "mine.txt").write_text("x")
    with pytest.raises(DatasetExists, match="something else is there"):
        penstock.stage(corpus, scratch)
    assert (scratch / "corpus" / "mine.txt").exists()


RANK = """
import sys, time, penstock
from penstock.dataset import _stage
def slowly(done, total):
    time.sleep(0.05)
print(penstock.stage(sys.argv[1], sys.argv[2], on_progress=slowly).copied_bytes)
"""


def test_of_many_ranks_one_copies_and_all_have_it(corpus, scratch):
    command = [sys.executable, "-c", RANK, str(corpus), str(scratch)]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    copied = [int(rank.communicate()[0]) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
    assert sorted(count > 0 for count in copied) == [False, False, True]
    assert penstock.verify(scratch / "corpus").is_sound
    assert names(scratch) == {"corpus"}


def test_a_rank_that_is_killed_half_way_is_followed_by_another(corpus, scratch):
    first = subprocess.Popen([sys.executable, "-c", RANK, str(corpus), str(scratch)], stdout=subprocess.DEVNULL)
    assert wait_until(lambda: list(scratch.rglob("shard-*")))
    time.sleep(0.06)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert not (scratch / "corpus").exists()
    assert penstock.verify(penstock.stage(corpus, scratch).path).is_sound


def test_the_command_says_what_it_did(corpus, scratch, capsys):
    assert main(["stage", str(corpus), str(scratch)]) == 0
    assert "and verified in" in capsys.readouterr().out
    assert main(["stage", str(corpus), str(scratch)]) == 0
    assert "already there, or copied by another process" in capsys.readouterr().out
    assert main(["stage", str(corpus), str(scratch), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["copied_bytes"] == 0


@pytest.mark.parametrize("name", ["corpus", ".corpus.staging", ".corpus.staging/data"])
def test_a_link_that_somebody_put_into_shared_scratch_is_not_followed(corpus, scratch, tmp_path, name):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").write_text("irreplaceable")
    (scratch / name).parent.mkdir(exist_ok=True)
    (scratch / name).symlink_to(precious)
    with pytest.raises(DatasetExists, match="is a link, or not a folder"):
        penstock.stage(corpus, scratch)
    assert names(precious) == {"thesis.tex"}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another user")
@pytest.mark.parametrize("name", ["corpus", ".corpus.staging", ".corpus.staging/data"])
def test_what_another_user_put_into_shared_scratch_is_not_taken_for_the_copy(corpus, scratch, name):
    if name == "corpus":
        shutil.copytree(corpus, scratch / name)
    else:
        (scratch / name).mkdir(parents=True)
    os.chown(scratch / name, 54_321, 54_321)
    with pytest.raises(DatasetExists, match="belongs to user 54321"):
        penstock.stage(corpus, scratch)
    os.chown(corpus, 54_321, 54_321)  # who owns the source may have staged it
    assert penstock.stage(corpus, scratch).path == scratch / "corpus"


def test_a_link_among_the_files_of_a_copy_is_replaced(corpus, scratch, tmp_path):
    shard = next(corpus.glob("shard-*"))
    shutil.copy(shard, tmp_path / "elsewhere")
    (scratch / ".corpus.staging" / "data").mkdir(parents=True)
    (scratch / ".corpus.staging" / "data" / shard.name).symlink_to(tmp_path / "elsewhere")
    penstock.stage(corpus, scratch)
    assert not (scratch / "corpus" / shard.name).is_symlink()
    assert penstock.verify(scratch / "corpus").is_sound

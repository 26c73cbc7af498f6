"""A disk that is really full while `prepare` runs: an error says what to do, and a rerun gives the same bytes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from filesystem.disks import mounted_disk
from penstock.preparation import prepare
from penstock.transforms import Tokenize

from .corpora import assert_holds, contents, make_corpus

DISK_BYTES = 8 << 20
SHARD = 200_000
COMMAND = [sys.executable, "-m", "penstock.cli", "prepare"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("corpus")
    return folder, make_corpus(folder, num_files=12, num_rows=600)


@pytest.fixture(scope="module")
def reference(corpus: tuple[Path, list[str]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    destination = tmp_path_factory.mktemp("reference") / "data"
    prepare(f"{corpus[0]}/*.jsonl", destination, transform=Tokenize("bytes"), workers=1, shard_bytes=SHARD)
    return contents(destination)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted_disk(tmp_path / "disk", DISK_BYTES) as disk:
        yield disk


def run_command(corpus: Path, destination: Path) -> subprocess.CompletedProcess[str]:
    settings = ["--tokenizer", "bytes", "--workers", "2", "--shard-bytes", str(SHARD), "--json"]
    command = [*COMMAND, f"{corpus}/*.jsonl", str(destination), *settings]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.stress
@pytest.mark.parametrize("free_kib", [64, 300, 1000])
def test_a_full_disk_is_named_with_its_bytes_and_a_rerun_gives_the_same_bytes(
    corpus: tuple[Path, list[str]], reference: dict[str, str], small_disk: Path, free_kib: int
) -> None:
    ballast, destination = small_disk / "ballast", small_disk / "data"
    ballast.write_bytes(bytes(shutil.disk_usage(small_disk).free - free_kib * 1024))
    done = run_command(corpus[0], destination)
    failure = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 1
    assert failure["error"] == "StorageError"
    assert str(destination) in failure["message"]
    assert "No space left on device (wrote " in failure["message"]
    assert "bytes are free there; make room or write elsewhere, then run again" in failure["message"]
    assert not (destination / "manifest.json").exists()
    ballast.unlink()
    again = run_command(corpus[0], destination)
    assert again.returncode == 0, again.stderr
    assert contents(destination) == reference
    assert_holds(destination, corpus[1])


@pytest.mark.stress
def test_finished_tasks_survive_a_full_disk(
    corpus: tuple[Path, list[str]], reference: dict[str, str], small_disk: Path
) -> None:
    ballast, destination = small_disk / "ballast", small_disk / "data"
    ballast.write_bytes(bytes(shutil.disk_usage(small_disk).free - 1_000_000))
    run_command(corpus[0], destination)
    ballast.unlink()
    again = json.loads(run_command(corpus[0], destination).stdout.splitlines()[-1])
    assert again["tasks_kept"] > 0
    assert contents(destination) == reference

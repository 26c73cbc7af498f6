"""What workers of a stream tell each other through common memory, and that they need not."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader as TorchDataLoader

import penstock
from penstock.pytorch._shared_crossings import PassCrossings, SharedCrossings, _key, _slots
from penstock.pytorch._shared_pages import SharedPages
from penstock.sources import Crossing

pytestmark = pytest.mark.filterwarnings("ignore:.*worker processes in total:UserWarning")


class LoggedFileSystem(LocalFileSystem):
    """Local files under logged://; every process appends the ranges it reads to one log."""

    protocol = "logged"
    log = ""

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **named: Any) -> bytes:
        with open(self.log, "ab", buffering=0) as log:
            log.write(f"{os.getpid()} {start} {end}\n".encode())
        return super().cat_file(path, start=start, end=end, **named)

    def info(self, path: str, **named: Any) -> dict[str, Any]:
        return super().info(path.removeprefix("logged://"), **named)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    fsspec.register_implementation("logged", LoggedFileSystem, clobber=True)
    monkeypatch.setattr(LoggedFileSystem, "log", str(tmp_path / "log"))
    return tmp_path / "log"


@pytest.mark.parametrize("loader", [penstock.DataLoader, TorchDataLoader])
@pytest.mark.parametrize("shuffle_buffer", [0, 100])
def test_workers_read_each_byte_of_a_file_once_in_every_epoch(
    tmp_path: Path, log: Path, loader: Any, shuffle_buffer: int
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"n": n, "text": "word " * (n % 40)}) + "\n" for n in range(60_000)))
    reading = penstock.SourceOptions(batch_bytes=64 << 10)
    stream = penstock.stream(f"logged://{path}", columns=["n"], shuffle_buffer=shuffle_buffer, reading=reading)
    batches = loader(
        stream, batch_size=1000, num_workers=3, multiprocessing_context="fork", persistent_workers=True, drop_last=False
    )
    for _ in range(2):
        log.unlink(missing_ok=True)
        assert sorted(n for batch in batches for n in batch["n"].tolist()) == list(range(60_000))
        ranges = [tuple(map(int, line.split())) for line in log.read_text().splitlines()]
        assert len({process for process, _, _ in ranges}) == 3
        assert sum(end - begin for _, begin, end in ranges) == path.stat().st_size


def test_an_entry_is_found_by_its_file_border_and_pass_alone() -> None:
    shared = SharedCrossings()
    crossing = Crossing(1007, b"\na line\n more")
    shared.of_pass(1).put("/a", 1000, crossing)
    assert shared.of_pass(1).get("/a", 1000) == crossing
    assert shared.of_pass(1).get("/a", 1001) is None
    assert shared.of_pass(1).get("/b", 1000) is None
    assert shared.of_pass(2).get("/a", 1000) is None


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=40), st.integers(0, 80), st.integers(1, 255))
def test_an_entry_that_is_not_whole_is_none(data: bytes, place: int, change: int) -> None:
    pages = SharedPages(512 * (64 << 10))
    crossings = PassCrossings(pages, 1)
    crossings.put("/a", 7, Crossing(9, data))
    key = _key("/a", 7)
    begin = next(slot for slot in _slots(key) if pages.view[slot : slot + 16] == key)
    pages.view[begin + place] ^= change
    is_outside = place >= 44 + len(data)
    assert crossings.get("/a", 7) == (Crossing(9, data) if is_outside else None)


def test_more_entries_than_there_is_room_for_are_forgotten_not_mixed_up() -> None:
    crossings = SharedCrossings().of_pass(1)
    for border in range(2000):
        crossings.put("/a", border, Crossing(border, b"%d" % border))
    kept = [border for border in range(2000) if crossings.get("/a", border) is not None]
    assert 400 < len(kept) <= 512
    assert all(crossings.get("/a", border) == Crossing(border, b"%d" % border) for border in kept)
    crossings.put("/a", 5000, Crossing(5000, b"x" * (64 << 10)))
    assert crossings.get("/a", 5000) is None


def put_one(shared: SharedCrossings) -> None:
    shared.of_pass(1).put("/a", 1, Crossing(3, b"from a worker"))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_and_its_parent_have_entries_in_common(method: str) -> None:
    shared = SharedCrossings()
    worker = multiprocessing.get_context(method).Process(target=put_one, args=(shared,))
    worker.start()
    worker.join()
    assert shared.of_pass(1).get("/a", 1) == Crossing(3, b"from a worker")


def test_a_copy_in_a_process_that_is_no_child_is_empty() -> None:
    shared = SharedCrossings()
    put_one(shared)
    copy = pickle.loads(pickle.dumps(shared))
    assert copy.of_pass(1).get("/a", 1) is None


LIMITED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
import penstock
from penstock.pytorch._shared_crossings import SharedCrossings
from penstock.sources import Crossing
assert [record["text"] for record in penstock.stream(sys.argv[1])] == ["a", "b"]
shared = SharedCrossings()
if os.fork() == 0:
    shared.of_pass(1).put("/a", 1, Crossing(3, b"from a fork"))
    os._exit(0)
os.wait()
assert shared.of_pass(1).get("/a", 1) == Crossing(3, b"from a fork")
"""


def test_where_files_may_not_be_large_streams_work_and_forks_share(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a\nb\n")
    done = subprocess.run([sys.executable, "-c", LIMITED, tmp_path / "a.txt"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_file_that_is_written_again_between_two_passes_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for text in ("one-two three", "four five-six"):
        path.write_text("\n".join(text.split(" ")) * 400)
        if text == "one-two three":
            stream = penstock.stream(path)
        stream.set_epoch(0)
        loader = penstock.DataLoader(stream, batch_size=None, num_workers=3, multiprocessing_context="fork")
        found = sorted(record["text"] for record in loader)
        assert found == sorted(path.read_text().splitlines())

"""A store that the fetcher asks: the same answers and errors as here, and an end that is told; objects in the cache."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import s3lite
from penstock.errors import DatasetChanged, ObjectMissing, StoreBusy, StoreError
from penstock.remote import connect, open_objects, open_store
from waiting import wait_until

pytest.importorskip("obstore", reason="pip install 'penstock-data[s3]'")


def fetcher_pid() -> int:
    from penstock.remote import _client

    assert _client._own.crew is not None
    (worker,) = _client._own.crew._workers
    assert worker.pid is not None
    return worker.pid


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[s3lite.Server]:
    with s3lite.serve(tmp_path / "s3") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server


def test_it_answers_as_a_store_in_this_process_does(server: s3lite.Server, tmp_path: Path) -> None:
    content = os.urandom(9 << 20)
    (tmp_path / "large").write_bytes(content)
    here = open_store("s3://bucket/data")
    with connect("s3://bucket/data") as store:
        etag = store.put("large", tmp_path / "large")
        assert store.head("large") == here.head("large")
        assert store.get_whole("large") == here.get_whole("large") == (content, etag)
        assert store.get("large", 5, 10) == content[5:10]
        assert store.get_whole("large", if_none_match=etag) is None
        assert store.replace("small", b"1", None)
        assert not store.replace("small", b"2", None)
        assert store.replace("small", b"3", store.head("small").etag)  # type: ignore[union-attr]
        assert sorted(store.names()) == ["large", "small"]
        store.delete("large")
        assert store.head("large") is None
        with pytest.raises(ObjectMissing, match="there is no such object"):
            store.get("large", 0, 1)


def test_a_store_that_cannot_be_opened_says_why() -> None:
    with pytest.raises(StoreError, match="az://bucket/data/opening"), connect("az://bucket/data"):
        raise AssertionError


def test_what_a_process_that_is_killed_was_asked_is_asked_again(server: s3lite.Server) -> None:
    with connect("s3://bucket/data") as store:
        store.put("a", b"12")
        server.behave(latency_seconds=1)
        timer = threading.Timer(0.5, os.kill, (fetcher_pid(), signal.SIGKILL))
        timer.start()
        assert (found := store.head("a")) is not None
        assert found.size == 2
        assert len(server.requests("HEAD")) == 2


def test_nobody_waits_for_answers_after_the_end(server: s3lite.Server) -> None:
    said: list[BaseException] = []

    def ask() -> None:
        try:
            store.head("a")
        except StoreBusy as error:
            said.append(error)

    with connect("s3://bucket/data") as store:
        server.behave(latency_seconds=60)
        asking = threading.Thread(target=ask)
        asking.start()
        wait_until(lambda: bool(store.asking))  # type: ignore[attr-defined]
    asking.join(30)
    assert str(said[0]) == "s3://bucket/data: nobody waits for the answer any more."


@pytest.mark.parametrize("is_put", [True, False], ids=["of an MD5", "of another kind"])
def test_objects_that_are_no_dataset_are_fetched_whole_once(
    is_put: bool, server: s3lite.Server, tmp_path: Path
) -> None:
    contents = {name: os.urandom(size) for name, size in (("a.tar", 9 << 20), ("b.tar", 100))}
    (server.root / "bucket" / "tars").mkdir()
    for name, content in contents.items():
        if is_put:
            open_store("s3://bucket/tars").put(name, content)
        else:
            (server.root / "bucket" / "tars" / name).write_bytes(content)
    server.behave(flip_every=3 if is_put else 0, busy_every=5)
    for _ in range(2):
        folder = open_objects("s3://bucket/tars", list(contents), tmp_path / "cache", None)
        for name, content in contents.items():
            folder.obtain(name)
            assert (folder.path / name).read_bytes() == content
    with pytest.raises(ObjectMissing, match=r"^s3://bucket/tars/c\.tar: there is no such object"):
        open_objects("s3://bucket/tars", ["a.tar", "c.tar"], tmp_path / "cache", None)


def test_an_object_that_is_replaced_is_not_mixed_with_what_was_there(server: s3lite.Server, tmp_path: Path) -> None:
    (server.root / "bucket" / "a.tar").write_bytes(bytes(100))
    folder = open_objects("s3://bucket", ["a.tar"], tmp_path / "cache", None)
    (server.root / "bucket" / "a.tar").write_bytes(bytes(99) + b"1")
    with pytest.raises(DatasetChanged, match=r"s3://bucket: the dataset was replaced"):
        folder.obtain("a.tar")

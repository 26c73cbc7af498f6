"""A store in a process of its own: the same answers and errors as here, and an end that is told."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import s3lite
from penstock.errors import ObjectMissing, StoreBusy, StoreError
from penstock.remote import connect, open_store

pytest.importorskip("obstore", reason="pip install 'penstock-data[s3]'")


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


def test_a_store_that_cannot_be_opened_says_why_at_the_first_question() -> None:
    with connect("az://bucket/data") as store, pytest.raises(StoreError, match="az://bucket/data/opening"):
        store.head("a")


@pytest.mark.parametrize("is_waiting", [True, False])
def test_the_death_of_its_process_is_an_error_and_not_a_wait(is_waiting: bool, server: s3lite.Server) -> None:
    with connect("s3://bucket/data") as store:
        store.head("a")
        pid = store._worker.pid  # type: ignore[attr-defined]
        server.behave(latency_seconds=20)
        timer = threading.Timer(0.5 if is_waiting else 0, os.kill, (pid, signal.SIGKILL))
        timer.start()
        if not is_waiting:
            timer.join()
        with pytest.raises(StoreBusy, match=r"^s3://bucket/data: the process that talks to the store has ended\."):
            store.head("a")

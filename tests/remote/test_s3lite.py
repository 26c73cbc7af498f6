"""The tests' own S3 server does what clients expect of S3, and misbehaves as it is told."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import s3lite

obstore = pytest.importorskip("obstore", reason="pip install 'penstock-data[s3]'")
DATA = bytes(range(256)) * 8192  # 2 MiB


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[s3lite.Server]:
    with s3lite.serve(tmp_path_factory.mktemp("s3lite") / "s3") as server:
        yield server


@pytest.fixture
def server(running: s3lite.Server) -> s3lite.Server:
    running.behave()
    return running


def store(server: s3lite.Server, bucket: str = "bucket", **config: str) -> Any:
    from obstore.store import S3Store

    known = {name.lower(): value for name, value in server.environment.items() if name != "AWS_ALLOW_HTTP"}
    return S3Store(
        bucket,
        config=known | config,
        client_options={"allow_http": True, "timeout": "2s"},
        retry_config={"max_retries": 2, "retry_timeout": timedelta(seconds=5)},
    )


def test_what_is_put_is_got_in_whole_and_by_range(server: s3lite.Server) -> None:
    objects = store(server)
    etag = objects.put("a/b c.bin", DATA, use_multipart=False)["e_tag"]
    assert objects.head("a/b c.bin")["e_tag"] == etag
    assert objects.head("a/b c.bin")["size"] == len(DATA)
    assert bytes(objects.get("a/b c.bin").bytes()) == DATA
    assert bytes(objects.get_range("a/b c.bin", start=100_000, end=1_100_000)) == DATA[100_000:1_100_000]
    assert (server.root / "bucket" / "a" / "b c.bin").read_bytes() == DATA
    objects.delete("a/b c.bin")
    with pytest.raises(FileNotFoundError, match="NoSuchKey"):
        objects.get("a/b c.bin")


def test_large_objects_are_put_in_parts_and_files_in_the_folder_are_objects(server: s3lite.Server) -> None:
    objects = store(server)
    objects.put("large", DATA * 4, use_multipart=True, chunk_size=5 << 20)
    assert bytes(objects.get("large").bytes()) == DATA * 4
    assert len(server.requests("PUT", "large")) == 2
    (server.root / "bucket" / "copied").write_bytes(b"from a folder")
    assert bytes(objects.get("copied").bytes()) == b"from a folder"
    names = {each["path"] for page in objects.list() for each in page}
    assert {"large", "copied"} <= names


def test_conditions_on_the_version_are_honoured(server: s3lite.Server) -> None:
    objects = store(server)
    first = objects.put("version", b"one")["e_tag"]
    with pytest.raises(obstore.exceptions.NotModifiedError):
        objects.get("version", options={"if_none_match": first})
    with pytest.raises(obstore.exceptions.AlreadyExistsError):
        objects.put("version", b"two", mode="create")
    objects.put("version", b"two")
    with pytest.raises(obstore.exceptions.PreconditionError):
        objects.get("version", options={"if_match": first})


def test_fsspec_reads_and_writes_it_too(server: s3lite.Server) -> None:
    s3fs = pytest.importorskip("s3fs", reason="pip install 'penstock-data[s3]'")
    access = {"key": s3lite.ACCESS_KEY, "secret": s3lite.SECRET_KEY, "endpoint_url": server.endpoint}
    files = s3fs.S3FileSystem(**access, skip_instance_cache=True)
    files.pipe_file("bucket/folder/by-fsspec", DATA)
    assert files.cat_file("bucket/folder/by-fsspec", start=5, end=500) == DATA[5:500]
    assert files.info("bucket/folder/by-fsspec")["size"] == len(DATA)
    assert files.ls("bucket/folder", detail=False) == ["bucket/folder/by-fsspec"]


@pytest.mark.parametrize("fault", ["busy", "reset", "short"])
def test_lost_answers_come_when_asked_again(server: s3lite.Server, fault: str) -> None:
    objects = store(server)
    objects.put("data", DATA)
    server.behave(**{f"{fault}_every": 2})
    got = [bytes(objects.get_range("data", start=0, end=len(DATA))) for _ in range(3)]
    assert got == [DATA] * 3
    suffered = [each for each in server.requests("GET", "data") if each.fault == fault]
    assert suffered
    assert all(each.num_bytes < len(DATA) for each in suffered)


def test_a_flipped_bit_arrives_and_one_in_an_upload_is_refused(server: s3lite.Server) -> None:
    objects = store(server)
    objects.put("flipped", DATA)
    server.behave(flip_every=1)
    got = bytes(objects.get("flipped").bytes())
    assert [place for place in range(len(DATA)) if got[place] != DATA[place]] == [len(DATA) - 1]
    with pytest.raises(Exception, match="XAmzContentSHA256Mismatch"):
        objects.put("flipped", DATA, use_multipart=False)


def test_a_stall_lasts_as_long_as_told_and_the_line_has_one_bandwidth(server: s3lite.Server) -> None:
    objects = store(server)
    objects.put("slow", DATA)
    server.behave(stall_every=1, stall_seconds=0.5)
    began = time.monotonic()
    assert bytes(objects.get("slow").bytes()) == DATA
    assert time.monotonic() - began >= 0.5
    server.behave(bandwidth=4 << 20)
    began = time.monotonic()
    assert bytes(objects.get("slow").bytes()) == DATA
    assert time.monotonic() - began >= 0.4


@pytest.mark.parametrize("code", sorted(s3lite.REFUSALS.keys() - {"SlowDown"}))
def test_refusals_carry_the_code_of_s3(server: s3lite.Server, code: str) -> None:
    objects = store(server)
    objects.put("refused", b"1")
    server.behave(refusal=code, refuse_after=1)
    objects.get("refused")
    with pytest.raises(Exception, match=code):
        objects.get("refused")


def test_strangers_and_missing_buckets_are_refused(server: s3lite.Server) -> None:
    with pytest.raises(Exception, match="InvalidAccessKeyId"):
        store(server, aws_access_key_id="stranger").get("data")
    with pytest.raises(Exception, match="AccessDenied"):
        store(server, aws_skip_signature="true").get("data")
    with pytest.raises(Exception, match="NoSuchBucket"):
        store(server, bucket="nowhere").get("data")


def test_the_server_ends_with_its_block(tmp_path: Path) -> None:
    with s3lite.serve(tmp_path / "s3") as server:
        os.kill(server.pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)

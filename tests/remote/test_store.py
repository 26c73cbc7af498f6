"""Stores behind URLs: what is written can be read, and every refusal is one plain sentence."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from penstock.errors import ObjectMissing, StoreBusy, StoreError
from penstock.remote import Head, check_url, open_store

pytest.importorskip("obstore", reason="pip install 'penstock-data[s3]'")
moto_server = pytest.importorskip("moto.server", reason="a server that speaks S3 is needed: pip install 'moto[server]'")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    server = moto_server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    yield f"http://127.0.0.1:{server.get_host_and_port()[1]}"
    server.stop()


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in {"ACCESS_KEY_ID": "k", "SECRET_ACCESS_KEY": "s", "REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    return monkeypatch


@pytest.fixture(params=["s3://bucket/data", "memory://bucket/data"])
def url(request: pytest.FixtureRequest, moto: str, account: pytest.MonkeyPatch) -> str:
    account.setenv("AWS_ENDPOINT_URL", moto)
    import boto3

    boto3.client("s3").create_bucket(Bucket="bucket")
    return str(request.param)


def test_an_object_is_read_back_whole_and_in_ranges(url: str) -> None:
    store = open_store(url + "/")
    store.put("a", b"0123456789")
    assert store.url == url
    assert store.get("a", 2, 5) == b"234"
    assert asyncio.run(store.fetch("a", 7, 10)) == b"789"
    found = store.get_whole("a")
    assert found is not None
    assert found[0] == b"0123456789"
    assert store.head("a") == Head(10, found[1])


def test_an_object_that_has_not_changed_is_not_sent_again(url: str) -> None:
    store = open_store(url)
    etag = store.put("b", b"old")
    assert etag is not None
    assert store.get_whole("b", if_none_match=etag) is None
    store.put("b", b"new")
    assert (store.get_whole("b", if_none_match=etag) or (b"", None))[0] == b"new"


def test_a_large_file_is_written_in_parts(url: str, tmp_path: Path) -> None:
    content = bytes(range(256)) * (20 << 12)
    (tmp_path / "large").write_bytes(content)
    open_store(url).put("large", tmp_path / "large")
    assert open_store(url).get_whole("large", if_none_match="other") == (content, open_store(url).head("large").etag)  # type: ignore[union-attr]


def test_what_is_deleted_is_missing_and_may_be_deleted_again(url: str) -> None:
    store = open_store(url)
    store.put("c", b"1")
    store.delete("c")
    store.delete("c")
    assert store.head("c") is None
    with pytest.raises(ObjectMissing, match=r"/data/c: there is no such object\. Check the URL\."):
        store.get("c", 0, 1)


class Refusing(BaseHTTPRequestHandler):
    """Answers `/bucket/STATUS-CODE` with that status and S3's error code."""

    def do_GET(self) -> None:
        status, code = self.path.rpartition("/")[2].split("-")
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode()
        self.send_response(int(status))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def refusing() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("answer", "kind", "sentence"),
    [
        ("404-NoSuchBucket", StoreError, r"there is no such bucket\. Check its name"),
        ("404-NoSuchKey", ObjectMissing, r"there is no such object"),
        ("403-InvalidAccessKeyId", StoreError, r"does not know these credentials\. Check the access key"),
        ("403-SignatureDoesNotMatch", StoreError, r"the secret key does not belong to the access key"),
        ("400-ExpiredToken", StoreError, r"the credentials have expired\. Renew them"),
        ("403-RequestTimeTooSkewed", StoreError, r"this machine's clock is wrong.* Set the clock"),
        ("403-AccessDenied", StoreError, r"access is denied\. Check the credentials"),
        ("301-PermanentRedirect", StoreError, r"the bucket is in another region\. Set AWS_REGION"),
        ("200-NoRange", StoreError, r"the server ignores Range"),
        ("503-SlowDown", StoreBusy, r"503 Service Unavailable"),
    ],
)
def test_a_refusal_is_one_sentence_with_a_next_step(
    answer: str, kind: type[StoreError], sentence: str, refusing: str, account: pytest.MonkeyPatch
) -> None:
    account.setenv("AWS_ENDPOINT_URL", refusing)
    with pytest.raises(StoreError, match=f"^s3://bucket/{answer}: .*{sentence}") as caught:
        asyncio.run(open_store("s3://bucket").fetch(answer, 0, 4))
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)


def test_a_server_that_does_not_run_is_named_with_its_setting(account: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    account.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    with pytest.raises(StoreBusy, match=r"the connection was refused\. Check the endpoint \(AWS_ENDPOINT_URL\)"):
        asyncio.run(open_store("s3://bucket").fetch("a", 0, 1))


@pytest.mark.parametrize("url", ["https://me:secret@host/data", "s3://bucket/data?X-Amz-Signature=secret"])
def test_a_url_with_credentials_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ValueError, match="give the URL without user name, password and query") as caught:
        check_url(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("s3:///data", "names no bucket"),
        ("simplecache::s3://bucket/data", "chained"),
        ("nosuch://bucket", "nosuch"),
    ],
)
def test_what_is_no_url_of_a_store_is_refused(url: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        open_store(url)

"""S3 sources against moto, a server on loopback that speaks S3."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.errors import StorageError
from penstock.sources import SourceOptions, list_files, plan_splits, read_split

from .gathering import gather, values
from .servers import Proxy, breakable

moto_server = pytest.importorskip("moto.server", reason="a server that speaks S3 is needed: pip install 'moto[server]'")
s3fs = pytest.importorskip("s3fs", reason="pip install 'penstock-data[s3]'")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
NUM_ROWS = 3000


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    server = moto_server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    port = server.get_host_and_port()[1]
    try:
        # Servers of one process share their buckets, also with those of other tests.
        urllib.request.urlopen(f"http://127.0.0.1:{port}/moto-api/reset", b"").close()
        _fill(port)
        with breakable(port) as proxy:
            yield proxy
    finally:
        server.stop()


def access(port: int) -> dict[str, Any]:
    return {
        "key": "k",
        "secret": "s",
        "endpoint_url": f"http://127.0.0.1:{port}",
        "client_kwargs": {"region_name": "eu-west-1"},
    }


def _fill(port: int) -> None:
    store = s3fs.S3FileSystem(**access(port))
    store.mkdir("bucket")
    for part in range(2):
        rows = [{"text": f"document {n}", "n": n} for n in range(part * NUM_ROWS, (part + 1) * NUM_ROWS)]
        store.pipe_file(f"bucket/lines/{part}.jsonl", b"".join(json.dumps(row).encode() + b"\n" for row in rows))
        with store.open(f"bucket/tables/{part}.parquet", "wb") as file:
            pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=500)


@pytest.mark.parametrize("url", ["s3://bucket/lines", "s3://bucket/tables/*.parquet"])
def test_folders_and_globs_on_s3_are_read_whole(proxy: Proxy, url: str) -> None:
    proxy.break_next("", times=0)
    rows, errors = gather(url, target_bytes=50_000, storage_options=access(proxy.port))
    assert not errors
    assert values(rows, "n") == list(range(2 * NUM_ROWS))


def test_the_identity_of_an_object_is_its_version(proxy: Proxy) -> None:
    proxy.break_next("", times=0)
    options = SourceOptions(storage_options=access(proxy.port))
    files = list_files("s3://bucket/lines", options)
    assert [file.path for file in files] == ["s3://bucket/lines/0.jsonl", "s3://bucket/lines/1.jsonl"]
    assert len({file.identity for file in files}) == 2
    assert list_files("s3://bucket/lines", options) == files


@pytest.mark.parametrize("fault", ["stall", "cut"])
def test_broken_connections_to_s3_are_made_again_with_a_limit(proxy: Proxy, fault: str) -> None:
    proxy.break_next("", times=0)
    options = SourceOptions(storage_options=access(proxy.port), timeout_seconds=1.0, max_attempts=3)
    [split, *_] = plan_splits(list_files("s3://bucket/lines/0.jsonl", options), options, 1 << 20)
    proxy.break_next(fault, times=2)
    assert sum(records.num_rows for records in read_split(split, options)) == NUM_ROWS
    assert proxy.num_faults == 2
    proxy.break_next(fault, times=1000)
    with pytest.raises(StorageError, match=r"s3://bucket/lines/0\.jsonl: reading failed after 3 attempts"):
        list(read_split(split, options))
    proxy.break_next("", times=0)


def test_what_is_not_there_is_a_clear_error(proxy: Proxy) -> None:
    proxy.break_next("", times=0)
    with pytest.raises(FileNotFoundError, match="no such file"):
        gather("s3://bucket/none.jsonl", storage_options=access(proxy.port))

"""Remote sources against real servers on loopback, whose connections stall and break."""

from __future__ import annotations

import gzip
import io
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.errors import StorageError
from penstock.sources import SourceOptions, list_files, plan_splits, read_split

from .gathering import gather, values
from .servers import Proxy, breakable, web_server

pytest.importorskip("fsspec")
pytest.importorskip("aiohttp", reason="pip install aiohttp")
NUM_ROWS = 5000
PATIENT = {"timeout_seconds": 0.5, "max_attempts": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    content = b"".join(json.dumps({"text": f"document {n}", "n": n}).encode() + b"\n" for n in range(NUM_ROWS))
    (folder / "a.jsonl").write_bytes(content)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(content))
    table = pa.table({"text": [f"document {n}" for n in range(NUM_ROWS)], "n": range(NUM_ROWS)})
    pq.write_table(table, folder / "a.parquet", row_group_size=500)
    with pa.OSFile(str(folder / "a.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=500)
    return folder


@pytest.fixture(params=[True, False], ids=["ranges", "no ranges"])
def has_ranges(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def any_port(folder: Path, has_ranges: bool) -> Iterator[int]:
    with web_server(folder, has_ranges=has_ranges) as port:
        yield port


@pytest.fixture
def proxy(folder: Path) -> Iterator[Proxy]:
    with web_server(folder, has_ranges=True) as port, breakable(port) as proxy:
        yield proxy


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet", "a.arrow"])
def test_every_format_is_read_over_http_with_and_without_ranges(any_port: int, name: str) -> None:
    rows, errors = gather(f"http://127.0.0.1:{any_port}/{name}", target_bytes=40_000, batch_bytes=50_000)
    assert not errors
    assert values(rows, "n") == list(range(NUM_ROWS))


def test_a_server_with_ranges_is_read_in_splits_and_one_without_in_one(any_port: int, has_ranges: bool) -> None:
    options = SourceOptions()
    files = list_files(f"http://127.0.0.1:{any_port}/a.jsonl", options)
    assert files[0].is_seekable is has_ranges
    assert (len(plan_splits(files, options, 40_000)) > 1) is has_ranges


def test_an_address_with_a_query_is_one_file_of_the_format_before_it(any_port: int) -> None:
    rows, _ = gather(f"http://127.0.0.1:{any_port}/a.jsonl?token=x*y"[:-2] + "y")
    assert len(rows) == NUM_ROWS


@pytest.mark.parametrize("fault", ["stall", "cut"])
@pytest.mark.parametrize("after_bytes", [0, 10_000])
def test_broken_connections_are_made_again_and_no_row_is_lost_or_doubled(
    proxy: Proxy, fault: str, after_bytes: int
) -> None:
    url = f"http://127.0.0.1:{proxy.port}/a.jsonl"
    options = SourceOptions(**PATIENT, batch_bytes=60_000)
    splits = plan_splits(list_files(url, options), options, 1 << 20)
    proxy.break_next(fault, times=2, after_bytes=after_bytes)
    rows = [n for split in splits for records in read_split(split, options) for n in records.columns["n"].to_pylist()]
    assert rows == list(range(NUM_ROWS))
    assert proxy.num_faults == 2


def test_a_stream_without_ranges_goes_on_after_a_broken_connection(folder: Path) -> None:
    with web_server(folder, has_ranges=False) as port, breakable(port) as proxy:
        url = f"http://127.0.0.1:{proxy.port}/a.jsonl"
        options = SourceOptions(**PATIENT, batch_bytes=20_000)
        splits = plan_splits(list_files(url, options), options, 1 << 20)
        for fault in ("cut", "stall"):
            proxy.break_next(fault, times=2, after_bytes=50_000)
            rows = [n for split in splits for each in read_split(split, options) for n in each.columns["n"].to_pylist()]
            assert rows == list(range(NUM_ROWS))
            assert proxy.num_faults == 2


@pytest.mark.parametrize("fault", ["stall", "cut"])
def test_a_connection_that_stays_broken_is_a_clear_error_in_bounded_time(proxy: Proxy, fault: str) -> None:
    url = f"http://127.0.0.1:{proxy.port}/a.jsonl"
    options = SourceOptions(**PATIENT)
    splits = plan_splits(list_files(url, options), options, 1 << 20)
    proxy.break_next(fault, times=1000)
    begin = time.monotonic()
    with pytest.raises(StorageError, match=r"http://127.0.0.1:\d+/a\.jsonl: reading failed after 3 attempts"):
        list(read_split(splits[0], options))
    assert time.monotonic() - begin < 10
    with pytest.raises(StorageError, match="3 attempts"):
        list_files(url, options)


def test_parquet_over_a_broken_connection_is_a_storage_error_and_not_called_damaged(proxy: Proxy) -> None:
    url = f"http://127.0.0.1:{proxy.port}/a.parquet"
    options = SourceOptions(**PATIENT)
    splits = plan_splits(list_files(url, options), options, 1 << 20)
    proxy.break_next("cut", times=1000)
    with pytest.raises(StorageError, match="3 attempts"):
        list(read_split(splits[0], options))
    proxy.break_next("cut", times=1)
    assert sum(records.num_rows for split in splits for records in read_split(split, options)) == NUM_ROWS


def test_a_missing_file_and_a_closed_port_are_clear_errors(any_port: int) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing\.jsonl: no such file"):
        gather(f"http://127.0.0.1:{any_port}/nothing.jsonl")
    with pytest.raises(StorageError, match="failed after 2 attempts"):
        gather("http://127.0.0.1:9/a.jsonl", max_attempts=2)
    with pytest.raises(ValueError, match="nonsense://x"):
        gather("nonsense://x/a.jsonl")


def test_memory_urls_are_listed_by_folder_and_glob(folder: Path) -> None:
    import fsspec

    store = fsspec.filesystem("memory")
    for name in ("one/a.jsonl", "one/b.jsonl", "one/_skip.jsonl", "two/c.jsonl"):
        store.pipe_file(f"/penstock/{name}", f'{{"text": "{name}"}}\n'.encode())
    try:
        assert values(gather("memory://penstock/one")[0]) == ["one/a.jsonl", "one/b.jsonl"]
        assert values(gather("memory://penstock/*/[bc].jsonl")[0]) == ["one/b.jsonl", "two/c.jsonl"]
        with pytest.raises(FileNotFoundError, match="no file matches"):
            gather("memory://penstock/*.parquet")
        with pytest.raises(FileNotFoundError, match="no such file"):
            gather("memory://penstock/none.jsonl")
    finally:
        store.rm("/penstock", recursive=True)


def test_images_of_a_remote_folder_have_classes() -> None:
    import fsspec

    store = fsspec.filesystem("memory")
    for name in ("cat/1.jpg", "dog/2.jpg"):
        store.pipe_file(f"/pictures/{name}", name.encode())
    try:
        rows, _ = gather("memory://pictures")
        assert [(row["class"], row["label"], row["image"]) for row in rows] == [
            ("cat", 0, b"cat/1.jpg"),
            ("dog", 1, b"dog/2.jpg"),
        ]
    finally:
        store.rm("/pictures", recursive=True)


def test_a_text_read_in_small_pieces_is_whole(any_port: int, folder: Path) -> None:
    rows, _ = gather(f"http://127.0.0.1:{any_port}/a.jsonl", format="text")
    assert values(rows) == [io.BytesIO((folder / "a.jsonl").read_bytes()).read().decode()]

"""Reading on from a block, from real web servers on loopback with ranges and without."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.sources import SourceOptions, list_files, plan_splits, read_rows

from .servers import web_server

pytest.importorskip("aiohttp", reason="pip install aiohttp")
RECORDS = [{"n": number, "text": f"document {number}"} for number in range(2000)]


@pytest.fixture(scope="module", params=[True, False], ids=["ranges", "no ranges"])
def server(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("served")
    content = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()
    (folder / "a.jsonl").write_bytes(content)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(content))
    pq.write_table(pa.Table.from_pylist(RECORDS), folder / "a.parquet", row_group_size=300)
    with web_server(folder, has_ranges=request.param) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_records_are_read_from_any_server_and_from_any_block(server: str, name: str) -> None:
    options = SourceOptions(batch_bytes=4096)
    [split] = plan_splits(list_files(f"{server}/{name}", options), options, 1 << 30)
    blocks = list(read_rows(split, options))
    assert [value for rows in blocks for value in rows.values] == RECORDS
    for number in (0, 1, len(blocks) // 2, len(blocks) - 1):
        rest = [value for rows in read_rows(split, options, blocks[number].place) for value in rows.values]
        assert rest == [value for rows in blocks[number:] for value in rows.values]

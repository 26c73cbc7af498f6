"""Presigned URLs: they open files, and are written down nowhere."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import penstock
from penstock.errors import StorageError
from penstock.sources import SourceOptions, list_files, without_secrets

from .servers import web_server

SECRET = "0123456789abcdef"
QUERY = f"X-Amz-Credential=AKIA%2F20260101&X-Amz-Expires=900&X-Amz-Signature={SECRET}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "raw"
    folder.mkdir()
    for name in ("a", "b"):
        lines = [f'{{"text": "{name} {n}"}}\n' for n in range(100)]
        (folder / f"{name}.jsonl").write_text("".join(lines) + ("{bad\n" if name == "b" else ""))
    return folder


def signed(port: int, name: str, signature: str = SECRET) -> str:
    return f"http://127.0.0.1:{port}/{name}?{QUERY.replace(SECRET, signature)}"


@pytest.mark.parametrize("has_ranges", [True, False])
def test_a_dataset_says_nowhere_how_its_sources_were_signed(tmp_path: Path, folder: Path, has_ranges: bool) -> None:
    with web_server(folder, has_ranges=has_ranges, signature=SECRET) as port:
        urls = [signed(port, "a.jsonl"), signed(port, "b.jsonl")]
        done = penstock.prepare(urls, tmp_path / "data", on_error="skip", workers=2)
    assert done.num_samples == 200
    assert sum(done.skipped.values()) == 1
    written = [path for path in (tmp_path / "data").rglob("*") if path.is_file()]
    assert any(b"b.jsonl" in path.read_bytes() for path in written)
    for path in written:
        assert SECRET.encode() not in path.read_bytes()
        assert b"X-Amz" not in path.read_bytes()


def test_a_file_stays_the_same_under_another_signature(tmp_path: Path, folder: Path) -> None:
    port = 0
    for signature, is_new in ((SECRET, True), ("fedcba9876543210", False)):
        with web_server(folder, has_ranges=True, signature=signature, port=port) as port:
            done = penstock.prepare(signed(port, "a.jsonl", signature), tmp_path / "data", workers=1)
            assert bool(done.tasks_run) == is_new
            records = list(penstock.stream(signed(port, "a.jsonl", signature)))
            assert len(records) == 100


def test_errors_and_logs_hide_signatures(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="penstock")
    with web_server(folder, has_ranges=True, signature="another") as port:
        for name in ("a.jsonl", "missing.jsonl"):
            with pytest.raises((StorageError, FileNotFoundError)) as raised:
                list_files(signed(port, name), SourceOptions(max_attempts=2))
            assert name in str(raised.value)
            assert SECRET not in str(raised.value)
    assert SECRET not in caplog.text


def test_parameters_that_choose_a_file_tell_files_apart(folder: Path) -> None:
    first, second, again = (
        without_secrets(f"https://me:{SECRET}@host/get.csv?id={number}&token={SECRET}") for number in (1, 2, 1)
    )
    assert first == again != second
    assert SECRET not in first
    assert first.startswith("https://host/get.csv")
    assert without_secrets("s3://bucket/a?b.csv") == "s3://bucket/a?b.csv"
    assert without_secrets("/data/a?b.csv") == "/data/a?b.csv"

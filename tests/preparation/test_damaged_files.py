"""Files that are truncated or not what their name says: an error that names them, or one counted skip each."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from penstock.errors import FormatError
from penstock.preparation import prepare
from penstock.shards import read_manifest
from penstock.transforms import DecodeImage, Tokenize

from .corpora import assert_holds

TEXTS = [f"document {number} " + "of some words " * (number % 7) for number in range(300)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def parquet_bytes() -> bytes:
    file = io.BytesIO()
    # Without checksums a parquet page with other bytes in it can be a valid page with other text.
    pq.write_table(pa.table({"text": TEXTS}), file, row_group_size=50, write_page_checksum=True)
    return file.getvalue()


def arrow_bytes() -> bytes:
    file = io.BytesIO()
    table = pa.table({"text": TEXTS})
    with pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=50)
    return file.getvalue()


def tar_bytes() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for number, text in enumerate(TEXTS):
            member = tarfile.TarInfo(f"{number:04d}.text")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return file.getvalue()


def half(data: bytes) -> bytes:
    return data[: len(data) // 2 + 100]


def nothing(data: bytes) -> bytes:
    return b""


def junk(data: bytes) -> bytes:
    return b"this is something else. " * 50


def zeros_inside(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes(200) + data[middle + 200 :]


WHOLE: dict[str, Callable[[], bytes]] = {
    "jsonl.gz": lambda: gzip.compress(LINES),
    "jsonl.zst": lambda: pa.compress(LINES, codec="zstd", asbytes=True),
    "parquet": parquet_bytes,
    "arrow": arrow_bytes,
    "tar": tar_bytes,
}
CASES = [
    *[(ending, damage) for ending in ("jsonl.gz", "jsonl.zst", "parquet") for damage in (half, nothing, junk)],
    ("parquet", zeros_inside),
    *[("arrow", damage) for damage in (half, junk)],
    ("tar", half),
]
FEW = [
    pytest.param(*case, marks=() if case[1] is half and case[0] in ("jsonl.gz", "parquet") else pytest.mark.stress)
    for case in CASES
]


def write_pair(folder: Path, ending: str, damage: Callable[[bytes], bytes]) -> Path:
    """A good file `a` and a damaged one `b`, which is returned."""
    data = WHOLE[ending]()
    (folder / f"a.{ending}").write_bytes(data)
    damaged = folder / f"b.{ending}"
    damaged.write_bytes(damage(data))
    return damaged


def run(folder: Path, **more: Any) -> Any:
    transform = Tokenize("bytes", column="text")
    return prepare(f"{folder}/[ab].*", folder / "data", transform=transform, workers=1, **more)


@pytest.mark.parametrize(("ending", "damage"), FEW)
def test_a_damaged_file_stops_the_run_and_is_named(
    tmp_path: Path, ending: str, damage: Callable[[bytes], bytes]
) -> None:
    damaged = write_pair(tmp_path, ending, damage)
    with pytest.raises(FormatError, match=damaged.name):
        run(tmp_path)
    assert not (tmp_path / "data" / "manifest.json").exists()


@pytest.mark.parametrize(("ending", "damage"), FEW)
def test_a_damaged_file_can_be_skipped_from_the_damage_on_and_prepared_once_it_is_repaired(
    tmp_path: Path, ending: str, damage: Callable[[bytes], bytes]
) -> None:
    damaged = write_pair(tmp_path, ending, damage)
    done = run(tmp_path, on_error="skip")
    assert done.skipped == {"damaged_file": 1}
    (first,) = read_manifest(tmp_path / "data").attributes["skipped"]["first"]
    assert (first["path"], first["reason"]) == (str(damaged), "damaged_file")
    assert damaged.name in first["message"]
    assert_holds(tmp_path / "data", TEXTS + TEXTS[: first["row"]])
    damaged.write_bytes(WHOLE[ending]())
    again = run(tmp_path, on_error="skip")
    assert again.skipped == {}
    assert_holds(tmp_path / "data", TEXTS + TEXTS)


def test_text_that_no_encoding_reads_is_one_skipped_row_with_its_file(tmp_path: Path) -> None:
    for name, data in {"a.txt": b"good", "b.txt": b"bad \xff\xfe", "c.txt": "naïve".encode("latin-1")}.items():
        (tmp_path / name).write_bytes(data)
    done = prepare(tmp_path / "*.txt", tmp_path / "data", transform=Tokenize("bytes"), workers=1, on_error="skip")
    assert done.skipped == {"invalid_utf8": 2}
    first = read_manifest(tmp_path / "data").attributes["skipped"]["first"]
    assert [Path(each["path"]).name for each in first] == ["b.txt", "c.txt"]
    assert_holds(tmp_path / "data", ["good"])


def test_images_that_cannot_be_decoded_are_skipped_with_their_files(tmp_path: Path) -> None:
    folder = tmp_path / "images" / "kind"
    folder.mkdir(parents=True)
    for number in range(4):
        pixels = np.random.default_rng(number).integers(0, 255, (40, 50, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.jpg")
    (folder / "1.jpg").write_bytes(half((folder / "1.jpg").read_bytes())[:-300])
    (folder / "2.jpg").write_bytes(b"")
    (folder / "3.jpg").write_bytes(junk(b""))
    source, settings = tmp_path / "images", {"transform": DecodeImage(size=16), "workers": 1}
    with pytest.raises(FormatError, match=r"1\.jpg.*corrupt_image"):
        prepare(source, tmp_path / "data", **settings)
    done = prepare(source, tmp_path / "data", on_error="skip", **settings)
    assert (done.num_samples, done.skipped) == (1, {"corrupt_image": 3})
    first = read_manifest(tmp_path / "data").attributes["skipped"]["first"]
    assert [Path(each["path"]).name for each in first] == ["1.jpg", "2.jpg", "3.jpg"]

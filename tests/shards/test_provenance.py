"""The file that says where samples came from: written with the dataset, read by who asks, checked like all else."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest

import penstock
from filesystem.children import addresses_in_use, run_in_child
from penstock.errors import CorruptionError, DatasetChanged, DatasetExists, FormatError, StorageError
from penstock.shards import read_manifest, read_provenance
from penstock.shards._manifest import parse_manifest

from .folders import COLUMNS, add_provenance, make_samples, samples_of, write
from .test_corruption import flip

CONTENT = {"sources": [["a.jsonl", 12, "x"]], "origins": {"files": ["a.jsonl"], "splits": []}}


@pytest.fixture
def noted(tmp_path: Path) -> Path:
    write(tmp_path / "ds", make_samples(1, 9))
    add_provenance(tmp_path / "ds", CONTENT)
    return tmp_path / "ds"


def file_of(path: Path) -> Path:
    (file,) = path.glob("provenance-*.json")
    return file


def test_it_is_read_back_and_changes_no_fingerprint(tmp_path: Path) -> None:
    write(tmp_path / "ds", make_samples(1, 9))
    ds = penstock.open(tmp_path / "ds")
    assert ds.storage.provenance() == {}
    add_provenance(tmp_path / "ds", CONTENT)
    assert ds.storage.provenance() == CONTENT
    assert penstock.open(tmp_path / "ds").fingerprint == ds.fingerprint
    assert penstock.verify(tmp_path / "ds").is_sound


def test_opening_and_reading_do_without_it(noted: Path) -> None:
    file_of(noted).unlink()
    assert samples_of(penstock.open(noted)) == make_samples(1, 9)
    with pytest.raises(FormatError, match=r"provenance-.*: the file is missing\. Restore it to trace"):
        penstock.open(noted).storage.provenance()


def test_a_flipped_bit_and_a_cut_are_found_and_named(noted: Path) -> None:
    file = file_of(noted)
    for position in range(file.stat().st_size):
        flip(file, position, position % 8)
        with pytest.raises(CorruptionError, match=f"{file}: the file does not match its checksum"):
            read_provenance(noted, read_manifest(noted))
        assert [str(file) in fault for fault in penstock.verify(noted).faults] == [True]
        flip(file, position, position % 8)
    os.truncate(file, 5)
    with pytest.raises(CorruptionError, match=f"{file}: the file has 5 bytes"):
        read_provenance(noted, read_manifest(noted))


def test_appending_keeps_it_and_overwriting_removes_it(noted: Path) -> None:
    write(noted, make_samples(2, 3), mode="append")
    assert read_provenance(noted, read_manifest(noted)) == CONTENT
    write(noted, make_samples(3, 3), mode="overwrite")
    assert list(noted.glob("provenance-*")) == []
    assert read_provenance(noted, read_manifest(noted)) == {}


def test_another_takes_its_place_and_the_old_file_goes(noted: Path) -> None:
    old, reader = file_of(noted), penstock.open(noted)
    new = add_provenance(noted, CONTENT | {"sources": []})
    assert file_of(noted) == new != old
    assert reader.storage.provenance() == CONTENT | {"sources": []}  # of the same samples, as it is now
    assert add_provenance(noted, CONTENT | {"sources": []}) == new
    assert penstock.verify(noted).is_sound


def test_a_reader_of_a_dataset_that_is_gone_is_told(noted: Path) -> None:
    reader = penstock.open(noted)
    write(noted, make_samples(4, 3), mode="overwrite")
    with pytest.raises(DatasetChanged):
        reader.storage.provenance()


def test_one_that_no_manifest_names_is_a_strange_file(noted: Path) -> None:
    (noted / "provenance-0123456789abcdef.json").write_text("{}")
    with (
        pytest.raises(DatasetExists, match="1 other files are there"),
        penstock.DatasetWriter(noted, COLUMNS, mode="overwrite"),
    ):
        pass


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"name": "../provenance-0123456789abcdef.json"}, "not the name of a provenance file"),
        ({"name": "provenance-0123456789ABCDEF.json"}, "not the name of a provenance file"),
        ("provenance-0123456789abcdef.json", "not the name of a provenance file"),
        ({"name": "provenance-0123456789abcdef.json", "bytes": -1, "crc32c": "00000000"}, "not a count"),
        ({"name": "provenance-0123456789abcdef.json", "bytes": 1, "crc32c": "0"}, "not a checksum"),
        ({"name": "provenance-0123456789abcdef.json", "bytes": 1}, "KeyError"),
    ],
)
def test_a_manifest_that_names_it_wrongly_is_refused(noted: Path, entry: Any, message: str) -> None:
    class Forged:
        def to_json(self) -> Any:
            return entry

    forged = dataclasses.replace(read_manifest(noted), provenance=Forged())  # type: ignore[arg-type]
    with pytest.raises(FormatError, match=message):
        parse_manifest(forged.to_bytes(), "manifest.json")


@pytest.mark.parametrize("data", [b"[1]", b"{", b"[" * 100_000])
def test_content_that_is_no_object_is_refused(noted: Path, data: bytes) -> None:
    from penstock.shards._layout import checksum

    file = file_of(noted)
    file.write_bytes(data)
    manifest = read_manifest(noted)
    assert manifest.provenance is not None
    entry = dataclasses.replace(manifest.provenance, num_bytes=len(data), checksum=checksum(data))
    with pytest.raises(FormatError, match=str(file)):
        read_provenance(noted, dataclasses.replace(manifest, provenance=entry))


@pytest.mark.parametrize(
    "origins",
    [
        5,
        [1],
        {"files": 5, "splits": []},
        {"files": ["a"], "splits": [[0]]},
        {"files": [], "splits": [[0, 0, 1, 9, None]]},
        {"files": ["a"], "splits": [["x", 0, 1, 9, None]]},
        {"files": ["a"], "splits": [[0, 0, 1, -9, None]]},
        {"files": ["a"], "splits": [[0, 0, 1, 10**30, None]]},
        {"files": ["a"], "splits": [[0, 0, 1, 9, "x"]]},
        {"files": ["a"], "splits": [[0, 0, 1, 9, []]]},
        {"files": ["a"], "splits": [[0, 0, 1, 9, [[1, 0, 1]]]]},
        {"files": ["a"], "splits": [[0, 0, 1, 9, [[0, 0, 1], [7, 0, 1], [5, 0, 1]]]]},
        {"files": ["a"], "splits": [[0, 0, 1, 9, None, 2]]},
        {"files": ["a", "b"], "splits": [[0, 0, 1, 9, [[0, 0, 0], [8, 2, 1]], 2]]},
    ],
)
def test_origins_that_lead_nowhere_are_refused_by_name(noted: Path, origins: Any) -> None:
    file = add_provenance(noted, {"origins": origins})
    with pytest.raises(FormatError, match=f"{file}: 'origins' must be files and splits"):
        penstock.open(noted).origin(3)


@pytest.mark.parametrize(
    ("split", "origin"),
    [
        ([0, 0, 50, 9, None], "a [0:50], row 3"),
        ([0, 0, 50, 9, [[0, 4, 1], [2, 20, 0]]], "a [0:50], row 20"),
        ([1, 0, 9, 9, None, 9], "e"),
        ([1, 0, 2, 9, [[0, 0, 0], [3, 1, 0]], 2], "c"),
        ([1, 0, 4, 900, None, 4], "e"),  # several samples of each file: a column says of which
        ([0, 0, 50, 0, None], None),
    ],
)
def test_origins_lead_to_file_and_row(noted: Path, split: list[Any], origin: str | None) -> None:
    add_provenance(noted, {"origins": {"files": [*"abcdefghij"], "splits": [split]}})
    assert penstock.open(noted).origin(3) == origin


@pytest.mark.stress
def test_one_larger_than_memory_is_verified_all_the_same_and_a_named_error_for_who_reads_it(noted: Path) -> None:
    file = file_of(noted)
    os.truncate(file, 1 << 30)
    manifest = read_manifest(noted)
    assert manifest.provenance is not None
    forged = dataclasses.replace(manifest, provenance=dataclasses.replace(manifest.provenance, num_bytes=1 << 30))
    (noted / "manifest.json").write_bytes(forged.to_bytes())

    def use() -> list[str]:
        resource.setrlimit(resource.RLIMIT_AS, (addresses_in_use() + (256 << 20),) * 2)
        with pytest.raises(StorageError, match=f"{file}: its 1,073,741,824 bytes do not fit in memory"):
            read_provenance(noted, read_manifest(noted))
        return list(penstock.verify(noted).faults)

    assert run_in_child(use) == [f"{file}: the file does not match its checksum. Restore it from a copy."]


def test_the_manifest_stays_small_however_many_files_there_are(noted: Path) -> None:
    add_provenance(noted, {"sources": [[f"/data/train/{number}.jpg", 1, "x"] for number in range(100_000)]})
    assert (noted / "manifest.json").stat().st_size < 5_000
    assert json.loads((noted / "manifest.json").read_text())["provenance"]["name"] == file_of(noted).name


PLACES = [(2**40, 0), (-1, 0), (0, -1), (1, 2), (-(2**63), -(2**63)), (0, 2**62)]


@pytest.mark.parametrize("place", PLACES)
def test_a_column_of_origins_that_leads_nowhere_is_refused_by_name(tmp_path: Path, place: tuple[int, int]) -> None:
    """It is data like any other, under right checksums."""
    with penstock.DatasetWriter(tmp_path / "ds", {"x": "int64", "origin": "int64[2]"}) as writer:
        for sample in ((0, 3), (1, 1), place):
            writer.write({"x": 1, "origin": sample})
    splits = [[0, 0, 10, 2, None], [1, 0, 2, 1, None, 2]]
    add_provenance(tmp_path / "ds", {"origins": {"files": ["a.jsonl", "b.txt", "c.txt"], "splits": splits}})
    ds = penstock.open(tmp_path / "ds")
    assert [ds.origin(index) for index in range(2)] == ["a.jsonl [0:10], row 3", "c.txt"]
    with pytest.raises(FormatError, match=rf"is row {place[1]} of split {place[0]}, which none of the 2 splits"):
        ds.origin(2)
    with pytest.raises(FormatError, match="which none of the 2 splits"):
        len(ds.split({"a": 0.5, "b": 0.5}, seed=1, by="file")["a"])


@pytest.mark.parametrize("spec", ["float32", "int64", "int64[*]", "bytes", "uint8[16]"])
def test_a_column_of_somebody_else_called_origin_is_no_column_of_origins(tmp_path: Path, spec: str) -> None:
    values = {"float32": 1.5, "int64": 9, "int64[*]": [9, 9, 9], "bytes": b"Rome", "uint8[16]": [255] * 16}
    with penstock.DatasetWriter(tmp_path / "ds", {"origin": spec}) as writer:
        writer.write({"origin": values[spec]})
    add_provenance(tmp_path / "ds", {"origins": {"files": ["a.jsonl"], "splits": [[0, 0, 10, 1, None]]}})
    ds = penstock.open(tmp_path / "ds")
    assert ds.origin(0) == "a.jsonl [0:10], row 0"
    assert sum(map(len, ds.split({"a": 0.5, "b": 0.5}, seed=1, by="file").values())) == 1

from __future__ import annotations

import gzip
import io
import tarfile
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.cli import main
from penstock.errors import FormatError
from penstock.sources import SourceOptions, Split, class_names, list_files, plan_splits, read_split

from .gathering import gather, values


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def image_folder(root: Path) -> Path:
    for name, number in (("dog", 1), ("cat", 2), ("cat", 3), ("emu/young", 4)):
        write(root / name / f"{number}.jpg", b"jpeg %d" % number)
    write(root / ".hidden" / "5.jpg", b"")
    write(root / "cat" / "notes.db", b"")
    return root


def tar_of(members: list[tuple[str, bytes]]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, content in members:
            header = tarfile.TarInfo(name)
            header.size = len(content)
            archive.addfile(header, io.BytesIO(content))
    return file.getvalue()


def test_images_come_as_stored_with_labels_by_sorted_class_folder(tmp_path: Path) -> None:
    rows, errors = gather(image_folder(tmp_path), batch_bytes=10)
    assert not errors
    assert [(row["class"], row["label"], row["image"]) for row in rows] == [
        ("cat", 0, b"jpeg 2"),
        ("cat", 0, b"jpeg 3"),
        ("dog", 1, b"jpeg 1"),
        ("emu", 2, b"jpeg 4"),
    ]
    assert values(rows, "path")[0] == str(tmp_path / "cat" / "2.jpg")


def test_labels_do_not_depend_on_how_images_are_split_or_on_which_are_new(tmp_path: Path) -> None:
    options = SourceOptions()
    files = list_files(image_folder(tmp_path), options)
    assert class_names(files) == ("cat", "dog", "emu")
    splits = plan_splits(files, options, 1)
    assert [split.labels for split in splits] == [(0,), (0,), (1,), (2,)]
    kept = SourceOptions(classes=class_names(files))
    assert plan_splits(files[2:], kept, 1) == splits[2:]
    with pytest.raises(ValueError, match="The class 'emu' is not one of"):
        plan_splits(files, SourceOptions(classes=("cat", "dog")), 1)


def test_a_glob_takes_the_class_from_the_folder_and_a_flat_folder_has_none(tmp_path: Path) -> None:
    image_folder(tmp_path)
    assert values(gather(str(tmp_path / "*" / "*.jpg"))[0], "class") == ["cat", "cat", "dog"]
    assert values(gather(str(tmp_path / "[cd]*"))[0], "class") == ["cat", "cat", "dog"]
    assert gather(tmp_path / "cat")[0][0].keys() == {"image", "path"}
    write(tmp_path / "stray.png", b"x")
    with pytest.raises(ValueError, match=r"stray\.png: this file is not in a class folder"):
        gather(tmp_path)


def test_an_image_over_the_limit_is_a_bad_row(tmp_path: Path) -> None:
    write(tmp_path / "a" / "1.png", b"x" * 100)
    write(tmp_path / "a" / "2.png", b"y")
    rows, [error] = gather(tmp_path, max_record_bytes=10)
    assert values(rows, "image") == [b"y"]
    assert (error.path, error.reason) == (str(tmp_path / "a" / "1.png"), "too_long")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.dictionaries(st.sampled_from(["jpg", "cls", "seg.png"]), st.binary(max_size=700), min_size=1)),
    st.integers(1, 2000),
)
def test_samples_of_a_tar_come_exactly_once(
    tmp_path_factory: pytest.TempPathFactory, samples: list[dict[str, bytes]], batch_bytes: int
) -> None:
    members = [(f"d/{n:04}.{name}", value) for n, each in enumerate(samples) for name, value in each.items()]
    path = tmp_path_factory.getbasetemp() / "samples.tar"
    path.write_bytes(tar_of(members))
    rows, errors = gather(path, batch_bytes=batch_bytes)
    assert not errors
    found = [({name: value for name, value in row.items() if value is not None}) for row in rows]
    assert found == [{"__key__": f"d/{n:04}", **each} for n, each in enumerate(samples)]


def test_compressed_tars_and_chosen_members_are_streamed(tmp_path: Path) -> None:
    data = tar_of([("1.jpg", b"one"), ("1.txt", b"first"), ("__meta__", b"x"), ("2.JPG", b"two")])
    write(tmp_path / "a.tar.gz", gzip.compress(data))
    assert gather(tmp_path)[0] == [
        {"__key__": "1", "jpg": b"one", "txt": b"first"},
        {"__key__": "2", "jpg": b"two", "txt": None},
    ]
    assert gather(tmp_path, columns=("jpg",))[0] == [{"jpg": b"one"}, {"jpg": b"two"}]


@pytest.mark.parametrize("name", ["../../etc/x.jpg", "/etc/x.jpg", "a/../../x.jpg", "a\\..\\x.jpg"])
def test_names_that_leave_the_folder_are_bad_rows(tmp_path: Path, name: str) -> None:
    write(tmp_path / "a.tar", tar_of([("1.jpg", b"one"), (name, b"evil"), ("2.jpg", b"two")]))
    rows, [error] = gather(tmp_path)
    assert values(rows, "jpg") == [b"one", b"two"]
    assert (error.row, error.reason) == (1, "unsafe_name")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.tar"]


def test_links_duplicates_and_giants_are_bad_rows(tmp_path: Path) -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, kind in (("1.jpg", tarfile.SYMTYPE), ("2.jpg", tarfile.LNKTYPE), ("3.jpg", tarfile.CHRTYPE)):
            header = tarfile.TarInfo(name)
            header.type, header.linkname = kind, "/etc/passwd"
            archive.addfile(header)
        for name, content in (("4.jpg", b"a"), ("4.jpg", b"b"), ("5.jpg", b"x" * 5000), ("6.jpg", b"good")):
            header = tarfile.TarInfo(name)
            header.size = len(content)
            archive.addfile(header, io.BytesIO(content))
    write(tmp_path / "a.tar", file.getvalue())
    rows, errors = gather(tmp_path, max_record_bytes=1000)
    assert values(rows, "__key__") == ["6"]
    assert [error.reason for error in errors] == ["not_a_file"] * 3 + ["duplicate", "too_long"]


def test_a_tar_cut_anywhere_is_an_error_also_between_two_members(tmp_path: Path) -> None:
    whole = tar_of([(f"{n}.jpg", bytes(1500)) for n in range(4)])
    path = tmp_path / "a.tar"
    for size in (0, 200, 512, 700, 2048, 2 * 2048, 2 * 2048 + 100, 4 * 2048):
        path.write_bytes(whole[:size])
        with pytest.raises(FormatError, match=r"a\.tar: the archive is truncated or damaged"):
            gather(path)
    path.write_bytes(whole[: 4 * 2048 + 1024])
    assert len(gather(path)[0]) == 4


def test_a_damaged_header_and_joined_tars_are_errors_and_not_the_end(tmp_path: Path) -> None:
    whole = tar_of([(f"{n}.jpg", bytes(100)) for n in range(4)])
    damaged = bytearray(whole)
    damaged[1024 + 5] ^= 1
    write(tmp_path / "a.tar", bytes(damaged))
    with pytest.raises(FormatError, match="at byte 1,024: bad checksum"):
        gather(tmp_path / "a.tar")
    write(tmp_path / "b.tar", whole + whole)
    with pytest.raises(FormatError, match="more data follows its end mark"):
        gather(tmp_path / "b.tar")


def npy(array: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array, allow_pickle=True)
    return out.getvalue()


def test_typed_members_are_numbers_and_arrays_and_the_key_is_kept(tmp_path: Path, inline: None) -> None:
    boxes = [np.arange(4.0 * count).reshape(count, 4) for count in range(3)]
    members = [
        member
        for row in range(3)
        for member in (
            (f"dir/{row}.jpg", b"pixels %d" % row),
            (f"dir/{row}.seg.png", b"mask %d" % row),
            (f"dir/{row}.cls", b"%d\n" % (row * 10)),
            (f"dir/{row}.boxes.npy", npy(boxes[row])),
        )
    ]
    write(tmp_path / "a.tar", tar_of(members))
    assert main(["prepare", str(tmp_path / "a.tar"), str(tmp_path / "data"), "--typed-members", "--workers", "1"]) == 0
    ds = penstock.open(tmp_path / "data")
    assert ds.schema.to_json() == {
        "key": "bytes",
        "jpg": "bytes",
        "seg_png": "bytes",
        "cls": "int64",
        "boxes_npy": "float64[*,4]",
    }
    assert [sample["key"] for sample in ds] == [b"dir/0", b"dir/1", b"dir/2"]
    assert [int(sample["cls"]) for sample in ds] == [0, 10, 20]
    assert [sample["boxes_npy"].tolist() for sample in ds] == [each.tolist() for each in boxes]
    assert ds[1]["seg_png"] == b"mask 1"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.cls", b"cat", "is not a decimal number"),
        ("a.id", b"9" * 21, "is not a decimal number of 64 bits"),
        ("a.npy", b"nonsense", "is not a .npy file of numbers"),
        ("a.npy", npy(np.array([{}], dtype=object)), "is not a .npy file of numbers"),
    ],
)
def test_members_that_are_not_what_they_say_are_bad_rows(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    write(tmp_path / "a.tar", tar_of([(name, content), ("b.cls", b"1")]))
    options = SourceOptions(typed_members=True)
    split = Split("webdataset", str(tmp_path / "a.tar"), 0, -1, 0)
    [records] = read_split(split, options)
    assert [error.reason for error in records.errors] == ["wrong_type"]
    assert message in records.errors[0].message
    assert records.columns["key"] == ["b"]


@pytest.mark.parametrize("number", [2**63 - 1, -(2**63), 2**64 - 1])
def test_numbers_of_64_bits_are_read_from_typed_members(tmp_path: Path, number: int) -> None:
    write(tmp_path / "a.tar", tar_of([("a.id", b"%d" % number), ("a.txt", b"x")]))
    penstock.prepare(tmp_path / "a.tar", tmp_path / "data", reading=SourceOptions(typed_members=True), workers=1)
    assert int(penstock.open(tmp_path / "data")[0]["id"]) == number


def test_a_member_called_key_is_not_replaced_by_the_key_of_its_sample(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", tar_of([("a.key", b"secret"), ("b.cls", b"1")]))
    [records] = read_split(Split("webdataset", str(tmp_path / "a.tar"), 0, -1, 0), SourceOptions(typed_members=True))
    assert "the column 'key' is for the keys of samples" in records.errors[0].message
    assert records.columns["key"] == ["b"]


def test_sounds_are_bytes_with_the_class_of_their_folder(tmp_path: Path, inline: None) -> None:
    for kind in ("bark", "meow"):
        (tmp_path / "raw" / kind).mkdir(parents=True)
        for number in range(2):
            with wave.open(str(tmp_path / "raw" / kind / f"{number}.wav"), "wb") as sound:
                sound.setnchannels(1)
                sound.setsampwidth(2)
                sound.setframerate(8000)
                sound.writeframes(bytes(2 * (number + 1)))
    penstock.prepare(tmp_path / "raw", tmp_path / "data", workers=1)
    ds = penstock.open(tmp_path / "data")
    assert ds.classes == ("bark", "meow")
    assert sorted(ds[:]["label"].tolist()) == [0, 0, 1, 1]
    for sample in ds:
        with wave.open(io.BytesIO(sample["audio"])) as sound:
            assert sound.getnframes() == 1 + int(sample["path"].decode()[-5])

"""Tars opened where they are: what the real writers wrote, what an index keeps, and what strangers may put there."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import pickle
import random
import re
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset

import penstock
from guarding import guarded, use_or_refuse
from penstock.cli import main
from penstock.errors import DatasetChanged, FormatError, PenstockError, SchemaError
from penstock.shards import _tar_index

from .forging import error_of

Samples = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def some_samples(number: int, first: int = 0) -> Samples:
    rng = np.random.default_rng(first)
    return [
        {
            "__key__": f"folder/{index:06}",
            "jpg": rng.bytes(int(rng.integers(0, 3000))),
            "cls": index % 7,
            "json": {"number": index},
            "seg.png": b"png" * (index % 5),
        }
        for index in range(first, first + number)
    ]


def write_webdataset(path: Path, samples: Samples) -> Path:
    with webdataset.TarWriter(str(path)) as writer:
        for sample in samples:
            writer.write(sample)
    return path


def write_tar(path: Path, members: list[tuple[str, bytes]], format: int = tarfile.GNU_FORMAT) -> Path:
    with tarfile.open(path, "w", format=format) as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def by_webdataset(paths: list[Path]) -> Samples:
    """What the library reads, with everything it adds left out."""
    source = webdataset.WebDataset([str(path) for path in paths], shardshuffle=False)
    return [
        {name: value for name, value in sample.items() if name in ("__key__",) or name[0] != "_"} for sample in source
    ]


def as_theirs(sample: dict[str, Any]) -> dict[str, Any]:
    """A sample of ours in the names and bytes of theirs."""
    named = {name.replace("seg_png", "seg.png"): value for name, value in sample.items()}
    key, cls = named.pop("__key__").decode(), named.pop("cls")
    return {"__key__": key, "cls": b"%d" % cls, **named}


def two_tars(folder: Path) -> list[Path]:
    folder.mkdir(exist_ok=True)
    return [write_webdataset(folder / f"train-{number:03}.tar", some_samples(30, 30 * number)) for number in range(2)]


@pytest.mark.filterwarnings("ignore")  # webdataset leaves its files open
def test_tars_of_webdataset_give_what_it_reads_on_10_000_samples(tmp_path: Path) -> None:
    paths = []
    for number in range(4):
        small = [{**each, "jpg": each["jpg"][:60]} for each in some_samples(2500, 2500 * number)]
        paths.append(write_webdataset(tmp_path / f"train-{number}.tar", small))
    ours, theirs = penstock.open(tmp_path / "train-{0..3}.tar"), by_webdataset(paths)
    assert len(ours) == len(theirs) == 10_000
    assert ours.schema.to_json() == {
        "__key__": "bytes",
        "cls": "int64",
        "jpg": "bytes",
        "json": "bytes",
        "seg_png": "bytes",
    }
    order = np.random.default_rng(0).permutation(10_000)
    for index, sample in zip(order.tolist(), ours.__getitems__(order), strict=True):
        assert as_theirs(sample) == theirs[index]


@pytest.mark.skipif(shutil.which("tar") is None, reason="there is no GNU tar")
@pytest.mark.parametrize("format", ["gnu", "pax", "ustar", "oldgnu", "v7"])
def test_tars_of_gnu_tar_give_the_files_that_it_packed(format: str, tmp_path: Path) -> None:
    rng, files = np.random.default_rng(0), {}
    deep = "d" * 60 if format in ("ustar", "v7") else "d" * 90 + "/" + "ö" * 100
    (tmp_path / "files" / deep).mkdir(parents=True)
    for number in range(40):
        name = f"{deep if number % 2 else '.'}/{number:03}"
        for extension in ("jpg", "txt"):
            files[f"{name}.{extension}"] = rng.bytes(int(rng.integers(0, 2000)))
            (tmp_path / "files" / f"{name}.{extension}").write_bytes(files[f"{name}.{extension}"])
    command = [
        "tar",
        f"--format={format}",
        "--sort=name",
        "-cf",
        str(tmp_path / "x.tar"),
        "-C",
        str(tmp_path / "files"),
        ".",
    ]
    subprocess.run(command, check=True)
    ds = penstock.open(tmp_path / "x.tar")
    assert len(ds) == 40
    for sample in ds:
        name = os.path.normpath(sample["__key__"].decode())
        name = f"{'' if '/' in name else './'}{name}"
        assert sample["jpg"] == files[f"{name}.jpg"]
        assert sample["txt"] == files[f"{name}.txt"]


def test_one_sample_many_samples_and_lengths_agree(tmp_path: Path) -> None:
    two_tars(tmp_path)
    ds = penstock.open(tmp_path / "*.tar")
    expected = some_samples(30) + some_samples(30, 30)
    for index in (0, 29, 30, -1):
        assert ds[index]["jpg"] == expected[index]["jpg"]
        assert json.loads(ds[index]["json"]) == expected[index]["json"]
    assert ds.lengths("jpg").tolist() == [len(sample["jpg"]) for sample in expected]
    assert ds.filter(cls=3)[:]["__key__"][0] == b"folder/000003"
    assert re.fullmatch(r".*/train-001\.tar \[0:\d+\], row 1", ds.origin(31) or "")
    assert sum(map(len, ds.split({"a": 0.5, "b": 0.5}, seed=1, by="__key__").values())) == 60
    assert ds.in_memory()[:]["__key__"][59] == b"folder/000059"
    with pytest.raises(IndexError, match="out of range"):
        ds[[60]]


def test_columns_are_chosen_and_typed(tmp_path: Path) -> None:
    two_tars(tmp_path)
    ds = penstock.open(tmp_path / "*.tar", columns={"cls": "bytes", "jpg": ""})
    assert ds.schema.to_json() == {"cls": "bytes", "jpg": "bytes"}
    assert ds[8]["cls"] == b"1"
    plan = ds.shuffle(seed=1).batch(4)
    (tmp_path / "plan.toml").write_text(plan.to_toml())
    assert penstock.load_plan(tmp_path / "plan.toml").fingerprint == plan.fingerprint
    with pytest.raises(SchemaError, match=r"no member 'png' in the tars; they have '__key__', 'cls', 'jpg'"):
        penstock.open(tmp_path / "*.tar", columns=["png"])
    with pytest.raises(SchemaError, match=r"'jpg': members of tars are 'bytes'.*not 'int64'"):
        penstock.open(tmp_path / "*.tar", columns={"jpg": "int64"})


FAULTY = [
    ("a.jpg", b"a"), ("a.cls", b"1"),
    ("b.jpg", b"b"),
    ("c.jpg", b"c"), ("c.cls", b"3"), ("c.cls", b"4"),
    ("d.jpg", b"d"), ("e.jpg", b"e"), ("e.cls", b"5"), ("d.cls", b"4"),
    ("/f.jpg", b"f"), ("/f.cls", b"6"),
    ("g.jpg", b"g"), ("g.cls", b"seven"),
    ("README", b"no sample"),
]  # fmt: skip


def test_faulty_samples_are_counted_and_named_and_refused_or_left_out(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", FAULTY)
    with pytest.raises(FormatError) as caught:
        penstock.open(path)
    message = str(caught.value)
    reasons = {"duplicate": 1, "unsafe_name": 1, "out_of_order": 1, "no cls": 1, "cls is no number": 1}
    assert "5 samples of 7 cannot be read" in message
    assert all(f"{reason}: {count}" in message for reason, count in reasons.items())
    assert "'b' in x.tar, 'c' in x.tar, 'd' in x.tar, …" in message
    ds = penstock.open(path, on_error="skip")
    assert [dict(sample) for sample in ds] == [
        {"__key__": b"a", "cls": 1, "jpg": b"a"},
        {"__key__": b"e", "cls": 5, "jpg": b"e"},
    ]
    assert ds.attributes["skipped"] == {"rows": 5, "by_reason": reasons}
    assert ds.attributes["ignored_members"] == 1
    assert pickle.loads(pickle.dumps(ds))[1]["jpg"] == b"e"
    assert sum(map(len, ds.split({"a": 0.5, "b": 0.5}, seed=1).values())) == 2
    assert len(penstock.open(path, columns=["jpg"], on_error="skip")) == 4
    assert len(penstock.open(path, columns={"jpg": "", "cls": "bytes"}, on_error="skip")) == 3


def test_numbers_are_what_fits_64_bits(tmp_path: Path) -> None:
    good = [b"-9223372036854775808", b"9223372036854775807", b" +7\n", b"00000000000000000012"]
    bad = [b"9223372036854775808", b"-9223372036854775809", b"1 2", b"-", b"", b"0x1", b"1" * 21]
    members = [(f"{number:02}.cls", content) for number, content in enumerate(good + bad)]
    ds = penstock.open(write_tar(tmp_path / "x.tar", members), on_error="skip")
    assert ds[:]["cls"].tolist() == [int(content) for content in good]
    assert ds.attributes["skipped"]["by_reason"] == {"cls is no number": len(bad)}


def test_links_devices_and_sparse_files_are_faults_of_their_samples(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        for number, kind in enumerate((tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE)):
            member = tarfile.TarInfo(f"{number}.txt")
            member.type, member.linkname = kind, f"{number}.txt"
            archive.addfile(member)
        member = tarfile.TarInfo("good.txt")
        member.size = 2
        archive.addfile(member, io.BytesIO(b"ok"))
    assert "4 samples of 5 cannot be read (not_a_file: 4" in (error_of(lambda: penstock.open(tmp_path / "x.tar")) or "")
    assert [each["txt"] for each in penstock.open(tmp_path / "x.tar", on_error="skip")] == [b"ok"]


@pytest.mark.skipif(shutil.which("tar") is None, reason="there is no GNU tar")
@pytest.mark.parametrize("format", ["gnu", "posix"])
def test_what_follows_a_sparse_file_is_found(format: str, tmp_path: Path) -> None:
    with open(tmp_path / "a.txt", "wb") as file:
        for place in range(40):
            file.seek(place * (1 << 20))
            file.write(b"x")
    (tmp_path / "b.txt").write_bytes(b"behind")
    command = ["tar", "-S", f"--format={format}", "-cf", "x.tar", "a.txt", "b.txt"]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert (tmp_path / "x.tar").stat().st_size < 1 << 20
    ds = penstock.open(tmp_path / "x.tar", on_error="skip")
    assert ds.attributes["skipped"]["rows"] == (1 if len(ds) == 1 else 0)
    assert ds[len(ds) - 1]["txt"] == b"behind"


def scans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tars whose headers are read from here on."""
    read: list[str] = []
    scan = _tar_index.scan_tar

    def noting(folder: Path, tar: Any) -> Any:
        read.append(tar.name)
        return scan(folder, tar)

    monkeypatch.setattr(_tar_index, "scan_tar", noting)
    return read


def test_headers_are_read_once_and_again_only_of_tars_that_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = scans(monkeypatch)
    one, two = two_tars(tmp_path)
    first = penstock.open(tmp_path / "*.tar")
    assert sorted(read) == ["train-000.tar", "train-001.tar"]
    assert penstock.open(tmp_path / "*.tar").fingerprint == first.fingerprint
    assert len(read) == 2
    write_webdataset(tmp_path / "train-002.tar", some_samples(5, 60))
    assert len(penstock.open(tmp_path / "*.tar")) == 65
    assert read[2:] == ["train-002.tar"]
    write_webdataset(one, some_samples(9, 100))
    changed = penstock.open(tmp_path / "*.tar")
    assert read[3:] == ["train-000.tar"]
    assert [changed[index]["__key__"] for index in (0, 9)] == [b"folder/000100", b"folder/000030"]
    two.unlink()
    assert len(penstock.open(tmp_path / "*.tar")) == 14
    write_tar(tmp_path / "train-003.tar", [("z.jpg", b"z"), ("z.flac", b"la")])
    ds = penstock.open(tmp_path / "*.tar", columns=["flac"], on_error="skip")
    assert [sample["flac"] for sample in ds] == [b"la"]
    assert len(read) == 5


def test_an_index_that_was_interrupted_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_tars(tmp_path)
    write_tar(tmp_path / "train-009.tar", [("z.jpg", b"z")])
    (tmp_path / "train-009.tar").write_bytes((tmp_path / "train-009.tar").read_bytes()[:700])
    monkeypatch.setattr(_tar_index, "_COMMIT_SECONDS", 0.0)
    with pytest.raises(FormatError, match=r"train-009\.tar: the archive is truncated or damaged"):
        penstock.open(tmp_path / "*.tar")
    read = scans(monkeypatch)
    write_tar(tmp_path / "train-009.tar", [("z.jpg", b"z")])
    assert len(penstock.open(tmp_path / "*.tar", columns=["jpg"])) == 61
    assert read == ["train-009.tar"]


def open_and_count(pattern: str) -> int:
    return len(penstock.open(pattern))


def test_of_many_processes_one_makes_the_index(tmp_path: Path) -> None:
    two_tars(tmp_path)
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        assert pool.map(open_and_count, [str(tmp_path / "*.tar")] * 6) == [60] * 6
    [index] = tmp_path.glob(".penstock-*")
    assert sorted(os.listdir(index)) == ["index"]


def test_an_index_is_kept_in_the_cache_where_the_folder_takes_none(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_tars(tmp_path / "tars")
    make = _tar_index.make_directory

    def refuse(path: Path) -> bool:
        if path.parent == tmp_path / "tars":
            raise penstock.errors.StorageError(30, f"{path}: Read-only file system")
        return make(path)

    monkeypatch.setattr(_tar_index, "make_directory", refuse)
    assert len(penstock.open(tmp_path / "tars" / "*.tar")) == 60
    assert not list((tmp_path / "tars").glob(".penstock*"))
    assert len(list((cache / "penstock" / "tars").iterdir())) == 1
    read = scans(monkeypatch)
    assert len(penstock.open(tmp_path / "tars" / "*.tar")) == 60
    assert read == []


def test_tars_that_change_under_the_reader_are_noticed(tmp_path: Path) -> None:
    one, _ = two_tars(tmp_path)
    ds = penstock.open(tmp_path / "*.tar")
    pickled = pickle.dumps(ds)
    assert len(ds[[0]]["jpg"]) == 1
    with open(one, "r+b") as file:
        file.truncate(2000)
    for use in (lambda: ds[0], lambda: ds[[5]]):
        with pytest.raises(DatasetChanged, match="the tar changed since it was indexed"):
            use()
    write_webdataset(one, some_samples(30, 500))
    with pytest.raises(DatasetChanged, match="a file changed since it was opened"):
        pickle.loads(pickled)


def test_an_index_that_lies_is_refused_or_made_again(tmp_path: Path) -> None:
    write_tar(tmp_path / "x.tar", [("a.jpg", b"a" * 100), ("b.jpg", b"b" * 100)])
    penstock.open(tmp_path / "x.tar")
    [folder] = tmp_path.glob(".penstock-*/index")
    columns = {"key": "bytes", "fault": "uint8", "begin0": "int64", "size0": "int64"}
    manifest = json.loads((folder / "manifest.json").read_text())["attributes"]
    for begin, size in ((2**62, 2**62), (-5, 3), (512, 2**40), (0, 2**63 - 1)):
        with penstock.DatasetWriter(folder, columns, mode="overwrite", attributes=manifest) as writer:
            writer.write_batch({"key": [b"a", b"b"], "fault": [0, 0], "begin0": [begin] * 2, "size0": [size] * 2})
        ds = penstock.open(tmp_path / "x.tar")
        with (
            guarded(),
            pytest.raises(FormatError, match=r"its index says that 'jpg' of sample 1 is outside of the tar"),
        ):
            ds[1]
    (folder / "manifest.json").write_text("{}")
    assert penstock.open(tmp_path / "x.tar")[1]["jpg"] == b"b" * 100


def header(size: bytes = b"00000000005\0", kind: bytes = b"0", goes_on: bool = False) -> bytes:
    raw = bytearray(512)
    raw[:5], raw[124:136], raw[156:157], raw[257:265], raw[482] = b"a.txt", size, kind, b"ustar\x0000", goes_on
    raw[148:156] = b"%06o\0 " % (sum(raw) + 8 * 32)
    return bytes(raw)


HUGE = b"\x80\0\0\0" + (2**63).to_bytes(8, "big")
PAX = b"31 size=1180591620717411303424\n".ljust(512, b"\0")
LIE = {
    "a size of 2^63": header(size=HUGE),
    "a negative size": header(size=b"\xff" * 12),
    "a size with a sign": header(size=b"-0000000005\0"),
    "a size beyond the end": header(size=b"77777777777\0"),
    "a name of 2^63 bytes": header(kind=b"L", size=HUGE),
    "a name of 1 GB": header(kind=b"L", size=b"07777777777\0"),
    "long names without end": header(kind=b"L", size=b"00000000000\0") * 3000,
    "pax records without end": (header(kind=b"x", size=b"00000001000\0") + b"a" * 512) * 10,
    "a pax size of 2^70": header(kind=b"x", size=b"00000000037\0") + PAX + header(),
    "a global name": header(kind=b"g", size=b"00000000014\0") + b"12 path=a.b\n".ljust(512, b"\0"),
    "a sparse map without end": header(kind=b"S", goes_on=True) + (bytes(504) + b"\1" + bytes(7)) * 3000,
    "another volume": header(kind=b"M"),
    "no end mark": header() + b"hello".ljust(512, b"\0"),
    "text": b"this is no tar at all, but it is long enough for a header" * 20,
}  # fmt: skip


@pytest.mark.parametrize("lie", LIE)
def test_hostile_headers_are_refused_in_little_memory(lie: str, tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(LIE[lie])
    with guarded(), pytest.raises(FormatError, match=r"x\.tar: the archive is truncated or damaged"):
        penstock.open(tmp_path / "x.tar")


def test_names_full_of_dots_do_not_make_thousands_of_columns(tmp_path: Path) -> None:
    write_tar(tmp_path / "x.tar", [(f"img.{number}.jpg", b"x") for number in range(300)])
    assert len(penstock.open(tmp_path / "x.tar", columns=["5_jpg"])) == 1
    write_tar(tmp_path / "y.tar", [(f"{number}.{number}.jpg", b"") for number in range(1500)])
    with pytest.raises(PenstockError, match=r"1,500 kinds of members|columns requested"):
        penstock.open(tmp_path / "y.tar")


def read_all(path: Path) -> None:
    ds = penstock.open(path, on_error="skip")
    ds[:]
    for index in range(min(3, len(ds))):
        ds[index]


@pytest.mark.parametrize("count", [150, pytest.param(5_000, marks=[pytest.mark.stress, pytest.mark.timeout(1800)])])
def test_whatever_a_tar_holds_it_is_read_or_refused(count: int, tmp_path: Path) -> None:
    members = [
        (f"{'deep/' * (number * 9)}{number}.{kind}", b"7" * number) for number in range(5) for kind in ("txt", "cls")
    ]
    examples = [
        write_tar(tmp_path / "x.tar", members, format).read_bytes()
        for format in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
    ]
    generator = random.Random(0)
    for _ in range(count):
        raw = bytearray(generator.choice(examples))
        for _ in range(generator.choice([1, 1, 3])):
            at = generator.randrange(len(raw) - 8)
            raw[at : at + 8] = generator.randbytes(generator.choice([1, 8])).ljust(
                8, generator.choice([b"\0", b"7", b" "])
            )
            block = at - at % 512
            if generator.random() < 0.8:  # most of the time with the right checksum, to get further
                head = raw[block : block + 148] + b" " * 8 + raw[block + 156 : block + 512]
                raw[block + 148 : block + 156] = b"%06o\0 " % sum(head)
        if generator.random() < 0.1:
            del raw[generator.randrange(len(raw)) :]
        (tmp_path / "x.tar").write_bytes(raw)
        with guarded():
            use_or_refuse(lambda: read_all(tmp_path / "x.tar"))


def test_commands_tell_that_tars_have_no_checksums(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tar(tmp_path / "x.tar", FAULTY)
    pattern = str(tmp_path / "*.tar")
    assert main(["inspect", pattern]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "2 samples in 1 file, " in shown
    assert "No checksums: damage to the data is not noticed. `penstock prepare` makes a checked copy." in shown
    assert re.search(r"skipped 5 rows \(.*no cls 1", shown)
    assert main(["inspect", pattern, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["checksums"], told["shards"], told["columns"]["cls"]) == (False, 1, "int64")
    assert main(["advise", str(write_tar(tmp_path / "good.tar", FAULTY[:2])), "--measure"]) == 0
    assert "have no checksums, so damage is not noticed" in " ".join(capsys.readouterr().out.split())
    assert main(["inspect", str(tmp_path / "none.tar")]) == 1


def test_compressed_tars_are_refused_with_advice(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"can only be read from its beginning.*`penstock prepare`"):
        penstock.open(tmp_path / "x.tar.gz")
    with pytest.raises(FileNotFoundError, match=r"x\.tar: no such file"):
        penstock.open(tmp_path / "x.tar")

"""No silent corruption: a damaged file is found, named, and never read as if it were sound."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.errors import CorruptionError, FormatError, PenstockError, StorageError
from penstock.shards import _open_shards

from .forging import SMALL, header_of, manifest_of, pad_header, put_shard, write_small
from .strategies import assert_columns, assert_sample, files_of, scratch, shard_paths

IOS = ("map", "pread")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_small(tmp_path / "ds")


@pytest.fixture(scope="module")
def pristine() -> Iterator[Path]:
    with scratch() as folder:
        yield write_small(folder / "ds")


def read_everything(path: Path, **options: Any) -> None:
    """Read all of a dataset in every way; right data or an error that is not a surprise."""
    ds = penstock.open(path, **options)
    assert_columns(ds.read(np.arange(len(ds))), SMALL, SMALL.samples)
    for index, expected in enumerate(SMALL.samples):
        assert_sample(ds[index], expected)
    assert ds.lengths("tokens").tolist() == [len(sample["tokens"]) for sample in SMALL.samples]


def place_of(path: Path, position: int) -> str:
    """What a message about a damaged byte must name."""
    if path.name == "manifest.json":
        return "manifest"
    header, data = header_of(path)
    begin = path.stat().st_size - len(data)
    if position < begin:
        return "header"
    for name, entry in header.items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            if first <= position - begin < last:
                return f"tensor {name!r}"
    raise AssertionError


def test_the_small_dataset_is_worth_flipping(pristine: Path) -> None:
    assert len(shard_paths(pristine)) >= 3
    assert penstock.verify(pristine).is_sound
    for io in IOS:
        read_everything(pristine, io=io)


def flips(path: Path, count: int, seed: int) -> list[tuple[str, int, int]]:
    """(file, byte, bit): a fifth in manifests, a fifth in headers, the rest in data and checksums."""
    rng = random.Random(seed)
    shards = [shard.name for shard in shard_paths(path)]
    chosen = []
    for number in range(count):
        name = "manifest.json" if number % 5 == 0 else rng.choice(shards)
        size = (path / name).stat().st_size
        if name != "manifest.json":
            first = 0 if number % 5 == 1 else 4096
            chosen.append((name, rng.randrange(first, 4096 if first == 0 else size), rng.randrange(8)))
        else:
            chosen.append((name, rng.randrange(size), rng.randrange(8)))
    return chosen


def test_each_of_500_flipped_bits_is_found_and_named(pristine: Path) -> None:
    found = 0
    for name, position, bit in flips(pristine, 500, seed=1):
        place = place_of(pristine / name, position)
        with damaged(pristine / name, position, bit):
            faults = penstock.verify(pristine).faults
            assert any(str(pristine / name) in fault and place in fault for fault in faults), (name, position, faults)
            if place.startswith("tensor") and "__crc32c__" not in place:
                assert f"block 0 of {place}" in faults[0]
            # A manifest is one whole; a shard does not make another suspect.
            assert all(str(pristine / name) in fault for fault in faults)
            found += 1
    assert found == 500
    assert penstock.verify(pristine).is_sound


def test_none_of_500_flipped_bits_is_read_as_data(pristine: Path) -> None:
    raised = 0
    for number, (name, position, bit) in enumerate(flips(pristine, 500, seed=2)):
        with damaged(pristine / name, position, bit), pytest.raises(FormatError) as caught:
            read_everything(pristine, io=IOS[number // 5 % 2])
        assert str(pristine / name) in str(caught.value)
        raised += 1
    assert raised == 500


@pytest.mark.parametrize("check", ["window", "never"])
def test_lengths_of_all_samples_raise_what_an_open_shard_does(
    check: Any, pristine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths of whole shards are read without opening them, and whatever is wrong must not be seen less well."""
    name = shard_paths(pristine)[1].name
    header, data = header_of(pristine / name)
    begin = (pristine / name).stat().st_size - len(data)
    text = len(json.dumps(header, separators=(",", ":"))) + 8
    tensors = [header[each]["data_offsets"] for each in ("tokens.offsets", "__crc32c__")]
    spans = [(0, text), (begin - 10, begin), *((begin + first, begin + last) for first, last in tensors)]
    places = [place for first, last in spans for place in range(first, last)]

    def found() -> object:
        try:
            return penstock.open(pristine, check=check).lengths("tokens").tolist()
        except FormatError as error:
            return str(error)

    sound, num_errors = found(), 0
    for place in places:
        with damaged(pristine / name, place, place % 8), monkeypatch.context() as patch:
            quick = found()
            patch.setattr(_open_shards, "read_offsets", lambda *args, **more: None)
            assert quick == found(), place
            num_errors += isinstance(quick, str)
    assert not isinstance(sound, str)
    assert num_errors == len(places) if check == "window" else num_errors > len(places) // 2


def test_lengths_of_shards_with_headers_in_another_order_are_read(small: Path) -> None:
    """safetensors headers of other writers, equal as JSON."""
    expected = penstock.open(small).lengths("tokens").tolist()
    for number in range(len(shard_paths(small))):
        header, data = header_of(small / manifest_of(small)["shards"][number]["name"])
        put_shard(small, number, pad_header(dict(reversed(header.items()))), data)
    assert penstock.open(small).lengths("tokens").tolist() == expected


@contextmanager
def damaged(path: Path, position: int, bit: int) -> Iterator[None]:
    """One bit of a file flipped, and put back."""
    flip(path, position, bit)
    try:
        yield
    finally:
        flip(path, position, bit)


def flip(path: Path, position: int, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ (1 << bit)]))


def test_a_flip_in_a_late_block_names_that_block(tmp_path: Path) -> None:
    with penstock.DatasetWriter(tmp_path / "ds", {"x": "uint8[1024]"}) as writer:
        writer.write_batch({"x": np.zeros((5000, 1024), np.uint8)})
    (shard,) = shard_paths(tmp_path / "ds")
    begin = 4096 + 40  # behind the checksums of ten blocks
    with damaged(shard, begin + 7 * 524288 + 99, 3):
        message = f"block 7 of tensor 'x' .bytes {begin + 7 * 524288:,} to {begin + 8 * 524288:,} of the file"
        (fault,) = penstock.verify(tmp_path / "ds").faults
        for io in IOS:
            ds = penstock.open(tmp_path / "ds", io=io)
            assert ds[4999]["x"].sum() == 0  # another window: nothing wrong with it
            for read in (lambda ds=ds: ds[3584], lambda ds=ds: ds.read([4999, 3584]), lambda ds=ds: ds[:]):
                with pytest.raises(CorruptionError, match=message) as caught:
                    read()
                assert str(caught.value) == fault
            with pytest.raises(CorruptionError, match="block 7"):
                penstock.open(tmp_path / "ds", io=io, check="open")


@pytest.mark.parametrize("io", IOS)
def test_a_window_found_bad_stays_bad(io: Any, small: Path) -> None:
    with damaged(shard_paths(small)[0], 4096 + 2, 0):
        ds = penstock.open(small, io=io)
        for _ in range(3):
            with pytest.raises(CorruptionError):
                ds.read([0, 1])
            with pytest.raises(CorruptionError):
                ds[0]


@pytest.mark.parametrize("io", IOS)
def test_other_columns_and_shards_stay_readable(io: Any, small: Path) -> None:
    shard = shard_paths(small)[0]
    header, _ = header_of(shard)
    with damaged(shard, 4096 + header["jpeg.values"]["data_offsets"][0], 0):
        ds = penstock.open(small, io=io)
        for index, expected in enumerate(SMALL.samples):
            assert ds.select_columns(["label"])[index]["label"] == expected["label"]
        assert ds[-1]["jpeg"] == SMALL.samples[-1]["jpeg"]
        assert ds.lengths("jpeg").tolist() == [len(sample["jpeg"]) for sample in SMALL.samples]
        with pytest.raises(CorruptionError, match=r"jpeg\.values"):
            ds[0]


def test_check_open_finds_it_at_open_and_check_window_does_not_look(small: Path) -> None:
    with damaged(shard_paths(small)[-1], 4096, 5):
        for io in IOS:
            with pytest.raises(CorruptionError, match="does not match its checksum"):
                penstock.open(small, io=io, check="open")
            assert penstock.open(small, io=io, check="window")[0]["label"] == SMALL.samples[0]["label"]


@pytest.mark.parametrize("io", IOS)
def test_check_never_trusts_the_data_but_not_the_header(io: Any, small: Path) -> None:
    shard = shard_paths(small)[0]
    header, _ = header_of(shard)
    begin = header["label"]["data_offsets"][0]
    with damaged(shard, 4096 + begin, 0):
        ds = penstock.open(small, io=io, check="never")
        wrong = SMALL.samples[0]["label"] ^ 1
        assert ds[0]["label"] == ds.read([0])["label"][0] == wrong
    with damaged(shard, 500, 0), pytest.raises(CorruptionError, match="header"):
        penstock.open(small, io=io, check="never")[0]


def test_every_truncation_is_found(pristine: Path) -> None:
    rng = random.Random(3)
    whole = files_of(pristine)
    for number in range(120):
        name = rng.choice(list(whole))
        length = rng.choice([0, 1, len(whole[name]) - 1, rng.randrange(len(whole[name]))])
        try:
            (pristine / name).write_bytes(whole[name][:length])
            faults = penstock.verify(pristine).faults
            assert any(str(pristine / name) in fault for fault in faults)
            with pytest.raises(FormatError, match=name):
                read_everything(pristine, io=IOS[number % 2])
        finally:
            (pristine / name).write_bytes(whole[name])
    assert penstock.verify(pristine).is_sound


@pytest.mark.parametrize("extra", [b"\0", b"x" * 5000])
@pytest.mark.parametrize("io", IOS)
def test_a_file_that_is_too_long_is_found(io: Any, extra: bytes, small: Path) -> None:
    for name, whole in files_of(small).items():
        (small / name).write_bytes(whole + extra)
        assert any(name in fault for fault in penstock.verify(small).faults)
        with pytest.raises(FormatError, match=name):
            read_everything(small, io=io)
        (small / name).write_bytes(whole)


SHRINK = """
    import itertools, os, sys, numpy as np, penstock
    from pathlib import Path
    from penstock.errors import StorageError
    path, io, check = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    shard = next(path.glob("shard-*"))
    whole = shard.read_bytes()
    reads = {
        "item": lambda ds: ds[len(ds) - 1], "first": lambda ds: ds[0],
        "gather": lambda ds: ds.read([0, len(ds) - 1]), "lengths": lambda ds: ds.lengths("t"),
        "all": lambda ds: ds[:],
        "stream": lambda ds: ds.storage.read_stream(ds.schema["t"], np.zeros(1, np.int64), np.empty((1, 9), np.int64)),
        "will_need": lambda ds: ds.storage.will_need(ds.schema["t"], 0, len(ds)),
        "dont_need": lambda ds: ds.storage.dont_need(ds.schema["t"], 0, len(ds)),
        "check": lambda ds: ds.storage.check_samples(ds.schema["t"], 0, len(ds)),
    }
    if check == "never":
        del reads["check"]
    warm = [lambda ds: ds[0], lambda ds: ds[:]]
    for keep, first, name in itertools.product([0, 4096, 50_000, len(whole) - 1], warm, reads):
        ds = penstock.open(path, io=io, check=check)
        first(ds)
        os.truncate(shard, keep)
        try:
            reads[name](ds)
        except StorageError as error:
            assert str(shard) in str(error) and "when it was opened" in str(error), error
        else:
            sys.exit(f"{name} noticed nothing")
        with open(shard, "r+b") as file:
            file.write(whole)
    print("done")
"""


@pytest.mark.parametrize("io", IOS)
@pytest.mark.parametrize("check", ["window", pytest.param("never", marks=pytest.mark.stress)])
def test_a_file_that_shrank_is_an_error_at_the_next_read_never_a_signal(check: str, io: str, tmp_path: Path) -> None:
    with penstock.DatasetWriter(tmp_path / "ds", {"x": "uint8[5000]", "t": "uint16[*]"}) as writer:
        writer.write_batch({"x": np.ones((40, 5000), np.uint8), "t": [np.arange(n * 9) for n in range(40)]})
    command = [sys.executable, "-c", textwrap.dedent(SHRINK), str(tmp_path / "ds"), io, check]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


@pytest.mark.parametrize("io", IOS)
def test_a_file_that_grew_is_an_error_at_the_next_read(io: Any, small: Path) -> None:
    ds = penstock.open(small, io=io)
    ds.read([0])
    with open(shard_paths(small)[0], "ab") as file:
        file.write(b"\0" * 10_000)
    for read in (lambda: ds.read([0]), lambda: ds[0], lambda: ds.lengths("tokens")):
        with pytest.raises(StorageError, match=r"had [0-9,]* when it was opened"):
            read()


@pytest.mark.parametrize("io", IOS)
def test_a_missing_shard_is_named(io: Any, small: Path) -> None:
    shard = shard_paths(small)[1]
    shard.unlink()
    ds = penstock.open(small, io=io)
    with pytest.raises(FormatError, match=f"{shard.name}: the shard is missing. Restore it"):
        ds[:]
    assert penstock.verify(small).faults == (f"{shard}: the shard is missing.",)


def put_link(shard: Path) -> None:
    shard.rename(shard.parent.parent / "elsewhere")
    shard.symlink_to(shard.parent.parent / "elsewhere")


def put_dangling_link(shard: Path) -> None:
    shard.unlink()
    shard.symlink_to("/nowhere")


def put_fifo(shard: Path) -> None:
    shard.unlink()
    os.mkfifo(shard)


def put_directory(shard: Path) -> None:
    shard.unlink()
    shard.mkdir()


def put_device(shard: Path) -> None:
    shard.unlink()
    shard.symlink_to("/dev/zero")


@pytest.mark.parametrize("put", [put_link, put_dangling_link, put_fifo, put_directory, put_device])
@pytest.mark.parametrize("io", IOS)
def test_anything_but_a_plain_file_in_place_of_a_shard_is_refused(io: Any, put: Any, small: Path) -> None:
    shard = shard_paths(small)[0]
    put(shard)
    with pytest.raises(FormatError, match=r"is a symbolic link|is not a regular file") as caught:
        penstock.open(small, io=io)[0]
    assert str(shard) in str(caught.value)
    (fault,) = penstock.verify(small).faults
    assert str(shard) in fault


@pytest.mark.parametrize("put", [put_link, put_fifo, put_directory, put_device])
def test_anything_but_a_plain_file_in_place_of_the_manifest_is_refused(put: Any, small: Path) -> None:
    put(small / "manifest.json")
    with pytest.raises(FormatError, match=r"manifest\.json is (a symbolic link|not a regular file)"):
        penstock.open(small)
    assert not penstock.verify(small).is_sound


def test_another_shard_of_the_same_dataset_does_not_pass_for_this_one(small: Path) -> None:
    first, second, *_ = shard_paths(small)
    shutil.copy(second, first)
    for io in IOS:
        with pytest.raises(FormatError, match=first.name):
            penstock.open(small, io=io)[0]


def test_verify_lists_every_fault_and_goes_on(small: Path) -> None:
    shards = shard_paths(small)
    shards[0].unlink()
    with damaged(shards[1], 4096, 0), damaged(shards[2], 10, 0):
        told: list[tuple[int, int]] = []
        report = penstock.verify(str(small), on_progress=lambda done, total: told.append((done, total)))
        assert [str(shard) in fault for shard, fault in zip(shards, report.faults, strict=False)] == [True] * 3
        assert len(report.faults) == 3
        assert not report.is_sound
        assert report.to_json()["faults"] == list(report.faults)
        assert told[-1] == (report.num_bytes, report.num_bytes)
        assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_a_damaged_table_of_checksums_is_one_fault(small: Path) -> None:
    shard = shard_paths(small)[0]
    header, _ = header_of(shard)
    with damaged(shard, 4096 + header["__crc32c__"]["data_offsets"][0] + 5, 1):
        (fault,) = penstock.verify(small).faults
        assert "'__crc32c__', the table of checksums, is damaged" in fault


def test_errors_are_what_people_already_catch() -> None:
    assert issubclass(CorruptionError, ValueError)
    assert issubclass(StorageError, OSError)
    assert issubclass(CorruptionError, PenstockError)


def test_what_verifying_found_reads_as_sentences(small: Path) -> None:
    assert str(penstock.verify(small)).startswith(f"{small}: sound. {len(SMALL.samples)} samples in ")
    first = shard_paths(small)[0]
    first.unlink()
    assert str(penstock.verify(small)).splitlines() == [f"{first}: the shard is missing.", f"{small}: 1 fault."]

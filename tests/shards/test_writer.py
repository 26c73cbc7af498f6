"""What `DatasetWriter` takes, what it refuses, and what it leaves behind."""

import json
import os
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import penstock
from penstock.errors import DatasetExists, FormatError, IncompleteDataset, SchemaError, StorageError
from penstock.schema import Ragged
from penstock.shards import DatasetWriter, read_manifest

from .faults import RefuseAt, intercepted
from .folders import COLUMNS, assert_tidy, contents, files_of, make_samples, write

SAMPLES = make_samples(1, 8)
OTHERS = make_samples(2, 5)

ONE = {"tokens": [1, 2], "label": 3, "blob": b"four"}


@pytest.fixture
def path(tmp_path):
    """Where a dataset may go; its parent is not there either."""
    return tmp_path / "deep" / "data"


@pytest.fixture
def dataset(path):
    """A dataset of three shards."""
    write(path, SAMPLES)
    return path


def write_one(path, spec, value):
    """Write one value of a column `x`, and what comes back."""
    with DatasetWriter(path, {"x": spec}) as writer:
        writer.write({"x": value})
    return penstock.open(path)[0]["x"]


def as_batch(samples):
    tokens, labels, blobs = zip(*samples, strict=True)
    return {"tokens": list(tokens), "label": list(labels), "blob": list(blobs)}


# Refusals


UNFIT = [
    ("uint8", 256, r"uint8 \(0 to 255\); the values go from 256 to 256. Declare a wider dtype"),
    ("uint16", -1, r"uint16 \(0 to 65535\); the values go from -1 to -1"),
    ("int8[*]", [0, -129, 7], "the values go from -129 to 7"),
    ("int64", np.uint64(2**63), "the values go from 9223372036854775808"),
    ("int64", 2**70, "int is not a number, or does not fit 64 bits"),
    ("int64", 1.0, "holds int64; float64 would lose information"),
    ("int64[*]", np.array([1.5], np.float32), "float32 would lose information"),
    ("int64", ml_dtypes.bfloat16(1), "bfloat16 would lose information"),
    ("float32", 1j, "complex128 would lose information"),
    ("bool", 1, "holds bool; int64 would lose information"),
    ("float32", 1e39, r"holds float32, which cannot hold 1e\+39"),
    ("float16[*]", [1.0, 70_000], "holds float16, which cannot hold 70000"),
    ("float8_e4m3fn", 1e3, "holds float8_e4m3fn, which cannot hold 1000"),
    ("bfloat16", 1e300, "holds bfloat16, which cannot hold"),
    ("int64[3]", [1, 2], r"is int64\[3\]; an array of shape \[2\] does not fit"),
    ("int64[3]", [], r"an array of shape \[0\] does not fit"),
    ("int64", [1], r"is int64; an array of shape \[1\] does not fit"),
    ("int64[*]", 1, r"is int64\[\*\]; an array of shape \[\] does not fit"),
    ("int64[*,2]", [[1, 2, 3]], r"is int64\[\*,2\]; an array of shape \[1, 3\] does not fit"),
    ("int64[*]", [[1], [2, 3]], "this value cannot be converted to an array"),
    ("int64", "1", "holds int64; str is not a number"),
    ("int64", None, "holds int64; NoneType is not a number"),
    ("float32", np.zeros(1, [("a", "f4")])[0], "is not a number"),
    ("bytes", "text", r"holds bytes, not str: encode it, as in text.encode\(\)"),
    ("bytes", [1, 2], "holds bytes; this value is list"),
    ("bytes", np.array([1, 2]), "holds bytes; this value is ndarray"),
    ("bytes", 3, "holds bytes; this value is int"),
    ("bytes", None, "holds bytes; this value is NoneType"),
]


@pytest.mark.parametrize(("spec", "value", "message"), UNFIT)
def test_a_value_that_does_not_fit_is_refused_with_the_column_and_the_reason(path, spec, value, message):
    writer = DatasetWriter(path, {"other": "int8", "x": spec})
    with pytest.raises(SchemaError, match=f"Column 'x'.*{message}"):
        writer.write({"other": 1, "x": value})
    writer.abort()


@pytest.mark.parametrize(("spec", "value"), [(spec, value) for spec, value, _ in UNFIT])
def test_a_value_that_does_not_fit_is_refused_in_a_batch_too(path, spec, value):
    writer = DatasetWriter(path, {"other": "int8", "x": spec})
    with pytest.raises(SchemaError, match="Column 'x'"):
        writer.write_batch({"other": [1, 2], "x": [value, value]})
    writer.abort()


@pytest.mark.parametrize("hand_in", ["write", "write_batch"])
def test_missing_and_unknown_columns_are_named(path, hand_in):
    with DatasetWriter(path, COLUMNS) as writer:
        with pytest.raises(SchemaError, match=r"missing here: \['label', 'blob'\], unknown: \['extra', 'Label'\]"):
            getattr(writer, hand_in)({"tokens": [1], "extra": 1, "Label": 2})
        with pytest.raises(SchemaError, match=r"missing here: \['tokens', 'label', 'blob'\]"):
            getattr(writer, hand_in)({})


def test_columns_of_a_batch_that_differ_in_length_are_refused_with_their_lengths(path):
    with DatasetWriter(path, COLUMNS) as writer:
        pattern = r"the same number of samples; these have \{'tokens': 2, 'label': 1, 'blob': 2\}"
        with pytest.raises(SchemaError, match=pattern):
            writer.write_batch({"tokens": [[1], [2]], "label": [3], "blob": [b"", b""]})


def test_a_batch_that_is_no_sequence_is_refused(path):
    with DatasetWriter(path, {"x": "int64[*]"}) as writer, pytest.raises(SchemaError, match="one value per sample"):
        writer.write_batch({"x": 3})


@pytest.mark.parametrize("offsets", [[0, 2], [1, 3], [0, 3, 2, 3], [], [0, 4]])
def test_a_ragged_whose_offsets_do_not_cover_its_values_is_refused(path, offsets):
    ragged = Ragged(np.arange(3), np.array(offsets, np.int64))
    with (
        DatasetWriter(path, {"x": "int64[*]"}) as writer,
        pytest.raises(SchemaError, match="offsets must be non-decreasing, from 0"),
    ):
        writer.write_batch({"x": ragged})


def test_what_was_refused_leaves_no_trace(path):
    with DatasetWriter(path, COLUMNS) as writer:
        writer.write(ONE)
        with pytest.raises(SchemaError):
            writer.write({**ONE, "blob": "text"})
        with pytest.raises(SchemaError):
            writer.write_batch({"tokens": [[1], [2]], "label": [1, 2], "blob": [b"", "text"]})
        writer.write(ONE)
    assert contents(path) == [([1, 2], 3, b"four")] * 2


def test_after_the_end_nothing_more_is_taken(path):
    with DatasetWriter(path, COLUMNS) as writer:
        writer.write(ONE)
    for hand_in in (writer.write, writer.write_batch):
        with pytest.raises(ValueError, match="The writer is closed"):
            hand_in(ONE)
    writer.close()
    writer.abort()
    assert contents(path) == [([1, 2], 3, b"four")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "replace"}, "mode='replace'; the choices are 'create', 'append' and 'overwrite'"),
        ({"shard_bytes": 0}, "shard_bytes=0; a shard has at least one byte"),
        ({"attributes": {"when": object()}}, "attributes must be valid JSON"),
        ({"attributes": {"x": float("nan")}}, "attributes must be valid JSON"),
        ({"attributes": {"path": os.fsdecode(b"caf\xe9")}}, "attributes must be valid JSON.* surrogates not allowed"),
        ({"attributes": {"x": json.loads("[" * 200 + "]" * 200)}}, "attributes must be valid JSON.* 100 nested levels"),
        ({"columns": {}}, "at least one column"),
        ({"columns": {"x": "int65"}}, "'int65' is not a dtype"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_is_made(path, arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        DatasetWriter(path, **{"columns": COLUMNS, **arguments})
    assert not path.parent.exists()


# Create, append, overwrite


def test_creating_makes_the_folder_and_its_parents(path):
    write(path, SAMPLES)
    assert contents(path) == SAMPLES
    assert_tidy(path)


def test_creating_in_an_empty_folder_is_fine(path):
    path.mkdir(parents=True)
    write(path, SAMPLES)
    assert contents(path) == SAMPLES


def test_creating_where_a_dataset_is_refuses_with_the_ways_out(dataset):
    before = files_of(dataset)
    with pytest.raises(
        DatasetExists, match=r"a dataset of 8 samples is already there. Use mode='append', mode='overwrite'"
    ):
        DatasetWriter(dataset, COLUMNS)
    assert files_of(dataset) == before


def test_appending_adds_behind_what_is_there_and_touches_no_old_shard(dataset):
    before = files_of(dataset)
    stamps = {name: os.stat(dataset / name).st_mtime_ns for name in before if name.startswith("shard-")}
    write(dataset, OTHERS, "append")
    assert contents(dataset) == SAMPLES + OTHERS
    assert {name: os.stat(dataset / name).st_mtime_ns for name in stamps} == stamps
    assert_tidy(dataset)


def test_appending_nothing_changes_nothing(dataset):
    before = files_of(dataset)
    write(dataset, [], "append")
    assert files_of(dataset) == before


def test_appending_where_nothing_is_refuses_and_leaves_nothing(path):
    with pytest.raises(IncompleteDataset, match="no dataset to append to; write one with mode='create'"):
        DatasetWriter(path, COLUMNS, mode="append")
    assert not path.parent.exists()


@pytest.mark.parametrize(
    "columns",
    [
        {"tokens": "uint16[*]", "label": "int64"},
        {"tokens": "uint16[*]", "label": "int32", "blob": "bytes"},
        {"label": "int64", "tokens": "uint16[*]", "blob": "bytes"},
    ],
)
def test_appending_other_columns_is_refused_with_both(dataset, columns):
    before = files_of(dataset)
    pattern = r"The dataset has the columns tokens: uint16\[\*\], label: int64, blob: bytes; cannot append .*"
    with pytest.raises(SchemaError, match=pattern):
        DatasetWriter(dataset, columns, mode="append")
    assert files_of(dataset) == before
    write(dataset, OTHERS, "append")


def test_overwriting_removes_exactly_the_old_shards(dataset):
    (dataset / "run.json").write_text("{}")
    write(dataset, OTHERS, "overwrite")
    assert contents(dataset) == OTHERS
    (dataset / "run.json").unlink()
    assert_tidy(dataset)


def test_overwriting_may_change_the_columns(dataset):
    with DatasetWriter(dataset, {"x": "float32"}, mode="overwrite") as writer:
        writer.write({"x": 0.5})
    assert penstock.open(dataset)[0] == {"x": 0.5}
    assert_tidy(dataset)


def test_overwriting_with_some_of_the_same_data_keeps_the_shards_they_share(dataset):
    assert len(read_manifest(dataset).shards) == 3
    write(dataset, SAMPLES[:5], "overwrite")
    assert contents(dataset) == SAMPLES[:5]
    assert_tidy(dataset)


def test_overwriting_where_nothing_is_creates(path):
    write(path, SAMPLES, "overwrite")
    assert contents(path) == SAMPLES


@pytest.mark.parametrize("name", ["notes.txt", "shard-000000-0123456789abcdef.safetensors", ".hidden", "folder/"])
@pytest.mark.parametrize("mode", ["create", "overwrite"])
def test_a_folder_with_files_of_others_is_refused_and_untouched(path, mode, name):
    if mode == "overwrite":
        write(path, SAMPLES)
    path.mkdir(parents=True, exist_ok=True)
    strange = path / name
    strange.mkdir() if name.endswith("/") else strange.write_text("precious")
    before = sorted(os.listdir(path))
    with pytest.raises(DatasetExists, match=rf"1 other files are there \({name.rstrip('/')}\)"):
        DatasetWriter(path, COLUMNS, mode=mode)
    assert sorted(os.listdir(path)) == before
    assert strange.is_dir() or strange.read_text() == "precious"
    assert contents(path) == (SAMPLES if mode == "overwrite" else None)


def test_a_path_that_no_file_system_takes_is_a_named_error(tmp_path):
    with pytest.raises(StorageError, match="File name too long"):
        DatasetWriter(tmp_path / ("x" * 300), COLUMNS)
    with pytest.raises(StorageError, match="File name too long"):
        penstock.open(tmp_path / ("x" * 300))


def test_a_file_in_place_of_the_folder_is_refused_and_untouched(tmp_path):
    (tmp_path / "file").write_text("precious")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StorageError, match="Not a directory"):
            DatasetWriter(place, COLUMNS)
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize("kind", ["link", "file"])
def test_something_else_in_place_of_the_working_folder_is_refused_and_untouched(dataset, tmp_path, kind):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("precious")
    if kind == "link":
        (dataset / ".writing").symlink_to(tmp_path / "elsewhere")
    else:
        (dataset / ".writing").write_text("precious")
    with pytest.raises((FormatError, StorageError), match=r"\.writing"):
        DatasetWriter(dataset, COLUMNS, mode="overwrite")
    assert (tmp_path / "elsewhere" / "file").read_text() == "precious"
    (dataset / ".writing").unlink()
    assert contents(dataset) == SAMPLES


def test_leftovers_that_are_no_plain_files_are_refused_and_not_waited_for(dataset):
    (dataset / ".writing").mkdir()
    os.mkfifo(dataset / ".writing" / "manifest.json")
    with pytest.raises(FormatError, match="not a regular file"):
        DatasetWriter(dataset, COLUMNS, mode="append")
    assert contents(dataset) == SAMPLES


# All or nothing


class Boom(Exception):
    """Raised by the user's code."""


def write_and_raise(path, mode, error):
    with DatasetWriter(path, COLUMNS, mode=mode, shard_bytes=50) as writer:
        for _ in range(5):
            writer.write(ONE)
        raise error


@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
def test_an_exception_in_the_block_leaves_nothing_at_all_where_nothing_was(path, error):
    with pytest.raises(error):
        write_and_raise(path, "create", error)
    assert not path.parent.exists()


def test_an_exception_in_the_block_leaves_a_folder_that_was_there(path):
    path.mkdir(parents=True)
    with pytest.raises(Boom), DatasetWriter(path, COLUMNS, shard_bytes=50):
        raise Boom
    assert os.listdir(path) == []


@pytest.mark.parametrize("mode", ["append", "overwrite"])
def test_an_exception_in_the_block_leaves_the_previous_dataset_byte_for_byte(dataset, mode):
    before = files_of(dataset)
    with pytest.raises(Boom):
        write_and_raise(dataset, mode, Boom)
    assert files_of(dataset) == before


def test_giving_up_leaves_the_previous_dataset_and_the_way_free(dataset):
    before = files_of(dataset)
    writer = DatasetWriter(dataset, COLUMNS, mode="overwrite", shard_bytes=50)
    writer.write(ONE)
    writer.write(ONE)
    writer.abort()
    writer.abort()
    writer.close()
    assert files_of(dataset) == before
    write(dataset, OTHERS, "overwrite")


def test_a_writer_that_is_forgotten_does_not_keep_the_lock(dataset):
    writer = DatasetWriter(dataset, COLUMNS, mode="append")
    del writer
    write(dataset, OTHERS, "append")
    assert contents(dataset) == SAMPLES + OTHERS
    assert_tidy(dataset)


@pytest.mark.parametrize("hand_in", ["write", "write_batch"])
def test_a_write_that_failed_half_way_and_was_hushed_up_cannot_be_committed(dataset, hand_in):
    before = files_of(dataset)
    writer = DatasetWriter(dataset, COLUMNS, mode="append", shard_bytes=50)
    writer.write(ONE)
    with intercepted(RefuseAt(1, 28, forever=True)), pytest.raises(StorageError, match="No space left"):
        writer.write(ONE) if hand_in == "write" else writer.write_batch(as_batch(OTHERS))
    with pytest.raises(ValueError, match="An earlier write failed halfway"):
        writer.write(ONE)
    with pytest.raises(ValueError, match="An earlier write failed halfway"):
        writer.close()
    assert files_of(dataset) == before


def test_an_empty_dataset_is_a_dataset(path):
    write(path, [])
    assert contents(path) == []
    assert os.listdir(path) == ["manifest.json"]
    write(path, SAMPLES, "append")
    assert contents(path) == SAMPLES


# Attributes


def test_attributes_are_kept_merged_by_appending_and_replaced_by_overwriting(path):
    for mode, given, kept in [
        ("create", {"source": {"url": "https://x", "parts": [1, None]}, "licence": "é"}, None),
        ("append", {"licence": "MIT"}, {"source": {"url": "https://x", "parts": [1, None]}, "licence": "MIT"}),
        ("append", None, {"source": {"url": "https://x", "parts": [1, None]}, "licence": "MIT"}),
        ("overwrite", {"new": 1}, {"new": 1}),
    ]:
        with DatasetWriter(path, COLUMNS, mode=mode, attributes=given):
            pass
        assert read_manifest(path).attributes == (given if kept is None else kept)


def test_attributes_changed_after_they_were_handed_in_are_not(path):
    attributes = {"list": [1]}
    with DatasetWriter(path, COLUMNS, attributes=attributes):
        attributes["list"].append(object())
    assert read_manifest(path).attributes == {"list": [1]}


# Shards


def test_shards_roll_over_by_size_and_none_is_larger(path):
    with DatasetWriter(path, {"x": "uint8[*]"}, shard_bytes=1000) as writer:
        for _ in range(25):
            writer.write({"x": np.zeros(92, np.uint8)})  # 100 bytes with its offset
    assert [shard.num_samples for shard in read_manifest(path).shards] == [10, 10, 5]


def test_a_sample_larger_than_a_shard_gets_a_shard_of_its_own(path):
    sizes = [10, 5000, 10, 10, 7000, 8000, 10]
    with DatasetWriter(path, {"x": "uint8[*]"}, shard_bytes=1000) as writer:
        for size in sizes:
            writer.write({"x": np.full(size, size % 251, np.uint8)})
    assert [shard.num_samples for shard in read_manifest(path).shards] == [1, 1, 2, 1, 1, 1]
    assert penstock.open(path).lengths("x").tolist() == sizes


def test_shards_of_one_sample(path):
    write(path, SAMPLES, shard_bytes=1)
    assert len(read_manifest(path).shards) == len(SAMPLES)
    assert contents(path) == SAMPLES


@pytest.mark.parametrize("sizes", [[8], [1] * 8, [3, 0, 5], [7, 1]])
@pytest.mark.parametrize("shard_bytes", [1, 150, 400, 10_000])
def test_the_same_samples_give_the_same_files_however_they_are_handed_in(tmp_path, sizes, shard_bytes):
    write(tmp_path / "one", SAMPLES, shard_bytes=shard_bytes)
    with DatasetWriter(tmp_path / "many", COLUMNS, shard_bytes=shard_bytes) as writer:
        begin = 0
        for size in sizes:
            part = SAMPLES[begin : begin + size]
            writer.write_batch(as_batch(part) if part else {"tokens": [], "label": [], "blob": []})
            begin += size
    assert files_of(tmp_path / "one") == files_of(tmp_path / "many")


def test_writing_the_same_again_gives_the_same_names_and_bytes(dataset):
    before = files_of(dataset)
    write(dataset, SAMPLES, "overwrite")
    assert files_of(dataset) == before


def test_one_changed_number_changes_the_name_of_its_shard_alone(dataset):
    before = [shard.name for shard in read_manifest(dataset).shards]
    changed = [*SAMPLES[:-1], (SAMPLES[-1][0], -1, SAMPLES[-1][2])]
    write(dataset, changed, "overwrite")
    after = [shard.name for shard in read_manifest(dataset).shards]
    assert after[:-1] == before[:-1]
    assert after[-1] != before[-1]


@pytest.mark.parametrize("hand_in", ["write", "write_batch"])
def test_memory_is_bounded_by_about_one_shard(path, hand_in):
    shard_bytes = 1 << 20
    sample = np.zeros(16 << 10, np.uint8)
    tracemalloc.start()
    try:
        with DatasetWriter(path, {"x": "uint8[*]", "y": "int64"}, shard_bytes=shard_bytes) as writer:
            tracemalloc.reset_peak()
            for number in range(40 * 64):
                if hand_in == "write":
                    writer.write({"x": sample, "y": number})
                elif number % 16 == 0:
                    writer.write_batch({"x": [sample] * 16, "y": np.arange(16)})
            _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(read_manifest(path).shards) >= 40
    assert peak < 2 * shard_bytes  # while a buffer grows, half of it is there twice


# Values


@pytest.mark.parametrize(
    ("spec", "value", "expected"),
    [
        ("int64", np.int8(-3), -3),
        ("uint8", np.int64(255), 255),
        ("int64", True, 1),
        ("float32", 3, 3.0),
        ("float32", np.float64(0.1), np.float32(0.1)),
        ("float32", float("-inf"), float("-inf")),
        ("bfloat16", 1.5, 1.5),
        ("bfloat16", np.float32(1.5), 1.5),
        ("float32", ml_dtypes.bfloat16(1.5), 1.5),
        ("complex64", 1 + 2j, 1 + 2j),
        ("bool", np.True_, True),
        ("int16[*]", range(3), [0, 1, 2]),
        ("int16[*]", (), []),
        ("float32[*,2]", [], np.empty((0, 2))),
        ("float32[*,2]", [[1, 2]], [[1, 2]]),
        ("int64[2]", np.array([1, 2], ">i4"), [1, 2]),
        ("int64[2]", np.arange(8)[::4], [0, 4]),
        ("int64[2,2]", np.arange(4).reshape(2, 2).T, [[0, 2], [1, 3]]),
        ("int64[0]", [], []),
        ("bytes", b"", b""),
        ("bytes", bytearray(b"ab"), b"ab"),
        ("bytes", memoryview(b"abcd")[::2], b"ac"),
        ("bytes", np.frombuffer(b"ab", np.uint8), b"ab"),
    ],
)
def test_what_converts_without_loss_is_taken(path, spec, value, expected):
    found = write_one(path, spec, value)
    np.testing.assert_array_equal(found, expected)
    assert isinstance(found, bytes) or found.shape == np.shape(expected)


def test_torch_tensors_are_taken_and_refusals_name_the_column(path):
    torch = pytest.importorskip("torch")
    with DatasetWriter(path, {"x": "int64[*]", "y": "float32[2]"}) as writer:
        writer.write({"x": torch.arange(3), "y": torch.tensor([0.5, 1.5])})
        writer.write_batch({"x": [torch.arange(2), torch.arange(0)], "y": torch.ones(2, 2, requires_grad=True)})
        with pytest.raises(SchemaError, match=r"Column 'y'.*shape"):
            writer.write({"x": torch.arange(1), "y": torch.zeros(3)})
        with pytest.raises(SchemaError, match="Column 'y'"):
            writer.write({"x": torch.arange(1), "y": torch.zeros(2).to_sparse()})
    ds = penstock.open(path)
    assert [sample.tolist() for sample in ds[0:3]["x"]] == [[0, 1, 2], [0, 1], []]
    assert ds[0:3]["y"].tolist() == [[0.5, 1.5], [1, 1], [1, 1]]


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_tensors_of_dtypes_that_torch_does_not_give_to_numpy_are_stored_bit_by_bit(path, name):
    torch = pytest.importorskip("torch")
    rows = torch.randn(5, 4, 3).to(getattr(torch, name)).transpose(1, 2)  # not contiguous
    with DatasetWriter(path, {"x": f"{name}[3,4]", "y": name, "z": "float32[3,4]"}) as writer:
        writer.write({"x": rows[0], "y": rows[0, 0, 0], "z": rows[0]})
        writer.write_batch({"x": rows[1:], "y": rows[1:, 0, 0], "z": rows[1:]})
    stored = penstock.open(path)[0:5]
    for column, expected in (("x", rows), ("y", rows[:, 0, 0])):
        assert stored[column].tobytes() == expected.contiguous().view(torch.uint8).numpy().tobytes()
    assert stored["z"].tolist() == rows.float().tolist()


def test_a_ragged_is_taken_as_a_batch(path):
    ragged = Ragged(np.arange(5, dtype=np.uint8), np.array([0, 2, 2, 5]))
    with DatasetWriter(path, {"x": "int32[*]", "raw": "bytes"}, shard_bytes=20) as writer:
        writer.write_batch({"x": ragged, "raw": ragged})
    found = penstock.open(path).read([0, 1, 2])
    assert [sample.tolist() for sample in found["x"]] == [[0, 1], [], [2, 3, 4]]
    assert list(found["raw"]) == [b"\x00\x01", b"", b"\x02\x03\x04"]


def test_what_was_handed_in_may_be_changed_afterwards(path):
    array = np.arange(4, dtype=np.uint16)
    with DatasetWriter(path, {"x": "uint16[*]", "y": "uint16[4]"}) as writer:
        writer.write({"x": array, "y": array})
        writer.write_batch({"x": [array], "y": array[None]})
        array[:] = 9
    assert penstock.open(path).read([0, 1])["y"].tolist() == [[0, 1, 2, 3]] * 2


def test_a_relative_path_is_that_of_the_moment_it_was_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    with DatasetWriter("data", COLUMNS) as writer:
        writer.write(ONE)
        os.chdir("other")
    assert contents(tmp_path / "data") == [([1, 2], 3, b"four")]
    assert os.listdir(Path("/proc/self/cwd")) == []


def test_nothing_stays_open(path):
    before = len(os.listdir("/proc/self/fd"))
    write(path, SAMPLES)
    write(path, OTHERS, "append")
    with pytest.raises(DatasetExists):
        DatasetWriter(path, COLUMNS)
    assert len(os.listdir("/proc/self/fd")) == before

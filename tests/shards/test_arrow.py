"""Arrow files and folders of `datasets`, opened where they are: the same values as those libraries give."""

from __future__ import annotations

import io
import json
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import penstock
from guarding import guarded, use_or_refuse
from penstock.errors import DatasetChanged, FormatError, SchemaError, StorageError

from .forging import error_of
from .strategies import law, scratch

FEATURES = datasets.Features(
    {
        "input_ids": datasets.List(datasets.Value("int32")),
        "text": datasets.Value("string"),
        "label": datasets.ClassLabel(names=["cat", "dog", "bird"]),
        "box": datasets.List(datasets.Value("float32"), length=4),
        "is_good": datasets.Value("bool"),
        "mask": datasets.List(datasets.Value("bool")),
        "image": datasets.Image(decode=False),
        "half": datasets.Value("float16"),
    }
)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def some_rows(number: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(number)
    pixels = io.BytesIO()
    Image.new("RGB", (8, 8), (number % 255, 3, 4)).save(pixels, "JPEG")
    return [
        {
            "input_ids": rng.integers(0, 50_000, rng.integers(0, 30)).tolist(),
            "text": "Ünïcode " * int(rng.integers(0, 4)),
            "label": place % 3,
            "box": rng.random(4, np.float32).tolist(),
            "is_good": place % 5 == 0,
            "mask": (rng.random(place % 11) < 0.5).tolist(),
            "image": {"bytes": pixels.getvalue() + bytes([place % 256]), "path": None},
            "half": place / 2,
        }
        for place in range(number)
    ]


def saved(folder: Path, number: int = 200, **options: Any) -> datasets.Dataset:
    made = datasets.Dataset.from_list(some_rows(number), features=FEATURES)
    made.save_to_disk(folder, **options)
    loaded: datasets.Dataset = datasets.load_from_disk(folder)
    return loaded


def same(sample: dict[str, Any], row: dict[str, Any]) -> None:
    assert sample.keys() == row.keys()
    for name, value in row.items():
        expected = value["bytes"] if name == "image" else value.encode() if name == "text" else value
        found = sample[name].tolist() if isinstance(sample[name], np.ndarray | np.generic) else sample[name]
        assert found == expected, name


def write_ipc(path: Path, table: pa.Table, *, is_file: bool = False, rows: int = 7, **options: Any) -> Path:
    write = pa.ipc.new_file if is_file else pa.ipc.new_stream
    with write(str(path), table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def test_a_saved_folder_gives_what_datasets_gives_on_10_000_samples(tmp_path: Path) -> None:
    ids = datasets.Features({name: FEATURES[name] for name in ("input_ids", "text", "label", "box")})
    rng = np.random.default_rng(0)
    rows = {
        "input_ids": [rng.integers(0, 50_000, length).tolist() for length in rng.integers(0, 40, 10_000)],
        "text": [f"text {number}" for number in range(10_000)],
        "label": [number % 3 for number in range(10_000)],
        "box": rng.random((10_000, 4), np.float32).tolist(),
    }
    datasets.Dataset.from_dict(rows, features=ids).save_to_disk(tmp_path / "saved", num_shards=3)
    theirs, ours = datasets.load_from_disk(tmp_path / "saved")[:], penstock.open(tmp_path / "saved")[:]
    assert [each.tolist() for each in ours["input_ids"]] == theirs["input_ids"]
    assert [each.decode() for each in ours["text"]] == theirs["text"]
    assert ours["label"].tolist() == theirs["label"]
    assert ours["box"].tolist() == theirs["box"]


def test_every_kind_of_column_is_read_one_by_one_and_together(tmp_path: Path) -> None:
    theirs = saved(tmp_path / "saved", num_shards=3)
    ours = penstock.open(tmp_path / "saved")
    assert ours.schema.to_json() == {
        "input_ids": "int32[*]",
        "text": "bytes",
        "label": "int64",
        "box": "float32[4]",
        "is_good": "bool",
        "mask": "bool[*]",
        "image": "bytes",
        "half": "float16",
    }
    assert ours.classes == ("cat", "dog", "bird")
    chosen = [199, 0, 66, 67, 133, 0, 12]
    for index, one in zip(chosen, ours.__getitems__(chosen), strict=True):
        same(one, theirs[index])
        same(ours[index], theirs[index])
    assert ours.lengths("mask").tolist() == [place % 11 for place in range(200)]


@pytest.mark.parametrize("is_file", [False, True])
def test_streams_and_files_of_arrow_are_read_by_any_pattern(is_file: bool, tmp_path: Path) -> None:
    for number in range(3):
        table = pa.table({"x": np.arange(20) + 20 * number, "y": [[number]] * 20})
        write_ipc(tmp_path / f"part-{number}.arrow", table, is_file=is_file)
    for path in (tmp_path / "*.arrow", tmp_path / "part-{0..2}.arrow", sorted(tmp_path.iterdir())):
        ds = penstock.open(path)
        assert ds[:]["x"].tolist() == list(range(60))
        assert ds[45]["y"].tolist() == [2]


@law
@given(
    st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=9), min_size=1, max_size=40),
    st.integers(1, 9),
    st.sampled_from([pa.list_(pa.int32()), pa.large_list(pa.int64()), pa.list_(pa.uint32())]),
    st.randoms(use_true_random=False),
)
def test_documents_are_the_same_however_they_are_cut_into_batches(
    documents: list[list[int]], rows: int, kind: Any, generator: random.Random
) -> None:
    with scratch() as folder:
        path = write_ipc(folder / "x.arrow", pa.table({"tokens": pa.array(documents, kind)}), rows=rows)
        ds = penstock.open(path)
        assert [each.tolist() for each in ds[:]["tokens"]] == documents
        shuffled = generator.choices(range(len(documents)), k=20)
        assert [each.tolist() for each in ds[shuffled]["tokens"]] == [documents[index] for index in shuffled]
        flat = [token for document in documents for token in document]
        begin = generator.randrange(len(documents) + 1)
        lengths = ds.storage.lengths(ds.schema["tokens"], begin, len(documents))
        assert lengths.tolist() == list(map(len, documents[begin:]))
        if len(flat) >= 4:
            windows = ds.window(3, column="tokens").batch(1)
            assert [windows.read(step)["input_ids"][0].tolist() for step in range(len(flat) // 3 - 1)] == [
                flat[3 * step : 3 * step + 3] for step in range(len(flat) // 3 - 1)
            ]


def test_batches_whose_first_sample_begins_behind_the_first_value_are_read_from_there(tmp_path: Path) -> None:
    path = write_ipc(tmp_path / "x.arrow", pa.table({"tokens": [[1], [2, 3], [4]]}), rows=3)
    raw = path.read_bytes()
    path.write_bytes(raw.replace(np.array([0, 1, 3, 4], "<i4").tobytes(), np.array([1, 1, 3, 3], "<i4").tobytes()))
    ds = penstock.open(path)
    assert [each.tolist() for each in ds[:]["tokens"]] == [[], [2, 3], []]
    assert ds.window(1).batch(1).read(0)["input_ids"].tolist() == [[2]]
    assert ds.lengths("tokens").tolist() == [0, 2, 0]


def test_objects_are_opened_with_their_slices_and_indices(tmp_path: Path) -> None:
    theirs = saved(tmp_path / "saved", num_shards=3)
    for given_ in (
        theirs,
        theirs.select(range(50, 150)),
        theirs.select(range(50, 150)).select(range(5, 60)),
        theirs.shuffle(seed=3),
        theirs.shuffle(seed=3).select(range(10, 90)).select([70, 3, 3]),
        datasets.concatenate_datasets([theirs.select(range(30)), theirs.select(range(20, 40))]),
        theirs.select_columns(["input_ids", "label"]).select([5, 3, 3]),
        theirs.remove_columns("text"),
        theirs.with_format("torch"),
    ):
        ours = penstock.open(given_)
        assert list(ours.schema) == given_.column_names
        assert len(ours) == len(given_)
        for index in (0, len(ours) // 2, len(ours) - 1):
            same(ours[index], given_.with_format(None)[index])
    again = pickle.loads(pickle.dumps(penstock.open(theirs.shuffle(seed=3))))
    same(again[7], theirs.shuffle(seed=3)[7])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ds: ds.rename_column("label", "class"), r"columns differ.*rename_columns.*save_to_disk"),
        (lambda ds: ds.map(lambda row: row, keep_in_memory=True), r"in memory.*save_to_disk"),
        (lambda ds: ds.with_transform(lambda rows: rows), r"transform, which is not in its files"),
        (lambda ds: datasets.DatasetDict(train=ds), r"Give one of its parts: 'train'"),
        (lambda ds: 5, r"not from a int"),
    ],
)
def test_objects_that_are_more_than_rows_of_files_are_refused(change: Any, message: str, tmp_path: Path) -> None:
    theirs = saved(tmp_path / "saved", 5)
    with pytest.raises(ValueError, match=message):
        penstock.open(change(theirs))


def test_files_of_indices_of_older_versions_are_honoured(tmp_path: Path) -> None:
    theirs = saved(tmp_path / "saved", 20)
    order = np.random.default_rng(0).permutation(20)[:15]
    write_ipc(tmp_path / "saved" / "indices.arrow", pa.table({"indices": order.astype(np.uint64)}))
    state = json.loads((tmp_path / "saved" / "state.json").read_text())
    state["_indices_files"] = [{"filename": "indices.arrow"}]
    (tmp_path / "saved" / "state.json").write_text(json.dumps(state))
    ours = penstock.open(tmp_path / "saved")
    assert len(ours) == 15
    assert ours.classes == ("cat", "dog", "bird")
    for index in (0, 7, 14):
        same(ours[index], theirs[int(order[index])])
    plan = ours.shuffle(seed=1).batch(4)
    (tmp_path / "plan.toml").write_text(plan.to_toml())
    assert penstock.load_plan(tmp_path / "plan.toml").fingerprint == plan.fingerprint
    write_ipc(tmp_path / "saved" / "indices.arrow", pa.table({"indices": np.array([20], np.uint64)}))
    with pytest.raises(FormatError, match="list rows that its files, of 20 rows, do not have"):
        penstock.open(tmp_path / "saved")


def test_tokenised_datasets_are_packed_as_they_are(tmp_path: Path) -> None:
    theirs = saved(tmp_path / "saved")
    plan = penstock.open(tmp_path / "saved").shuffle(seed=1).pack(64, column="input_ids").batch(4)
    arrays = penstock.from_arrays({"input_ids": [np.array(ids, np.int32) for ids in theirs["input_ids"]]})
    expected = arrays.shuffle(seed=1).pack(64, column="input_ids").batch(4)
    for step in range(3):
        assert np.array_equal(plan.read(step)["input_ids"], expected.read(step)["input_ids"])


def test_missing_values_are_refused_or_left_out_and_counted(tmp_path: Path) -> None:
    images = [{"bytes": b"x", "path": None}, {"bytes": None, "path": "far.jpg"}, None, {"bytes": b"z", "path": "z"}]
    kind = pa.struct([("path", pa.string()), ("bytes", pa.binary())])
    table = pa.table({"t": [1, 2, 3, None], "image": pa.array(images, kind), "u": [[1], [2], [], [4]]})
    path = write_ipc(tmp_path / "x.arrow", table, rows=3)
    with pytest.raises(FormatError, match=r"3 samples of 4 have missing values, such as number 1\. Leave them out"):
        penstock.open(path)
    ds = penstock.open(path, on_error="skip")
    assert [dict(each) for each in ds] == [{"t": 1, "image": b"x", "u": np.array([1])}]
    assert ds.attributes["skipped"] == {"rows": 3, "by_reason": {"missing": 3}}
    assert [each.tolist() for each in penstock.open(path, columns=["u"])[:]["u"]] == [[1], [2], [], [4]]
    write_ipc(path, pa.table({"t": [[1, None], [2]]}))
    with pytest.raises(FormatError, match=r"lists of 't' have missing values.*Leave the column out"):
        penstock.open(path, on_error="skip")


def test_columns_that_cannot_be_read_in_place_are_named_with_the_rest(tmp_path: Path) -> None:
    table = pa.table({"ok": [1], "meta": [{"a": 1}], "words": [["a"]], "when": pa.array([1], pa.timestamp("us"))})
    path = write_ipc(tmp_path / "x.arrow", table)
    with pytest.raises(SchemaError, match=r"column 'meta' cannot be opened as it is: struct.*columns=\['ok'\]"):
        penstock.open(path)
    assert penstock.open(path, columns="ok")[0] == {"ok": 1}
    with pytest.raises(SchemaError, match="no column 'okay'"):
        penstock.open(path, columns=["okay"])


def test_columns_are_found_behind_others_of_every_kind(tmp_path: Path) -> None:
    table = pa.table(
        {
            "null": pa.nulls(3),
            "struct": [{"a": [{"b": "review"}], "c": 1}] * 3,
            "map": pa.array([[("a", 1)]] * 3, pa.map_(pa.string(), pa.int32())),
            "dictionary": pa.array(["a", "b", "a"]).dictionary_encode(),
            "decimal": pa.array([1, 2, 3]).cast(pa.decimal128(20)),
            "sixteen": pa.array([b"a" * 16] * 3, pa.binary(16)),
            "cube": pa.array([[[1, 2], [3, 4], [5, 6]]] * 3, pa.list_(pa.list_(pa.int16(), 2), 3)),
            "points": pa.array([[[1.0, 2.0]], [], [[3.0, 4.0]] * 2], pa.list_(pa.list_(pa.float32(), 2))),
            "last": pa.array(["x", "yy", ""], pa.large_string()),
        }
    )
    ds = penstock.open(write_ipc(tmp_path / "x.arrow", table, rows=2), columns=["sixteen", "cube", "points", "last"])
    spec = {"sixteen": "uint8[16]", "cube": "int16[3,2]", "points": "float32[*,2]", "last": "bytes"}
    assert ds.schema.to_json() == spec
    assert ds[2]["sixteen"].tobytes() == b"a" * 16
    assert ds[1]["cube"].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert [each.tolist() for each in ds[:]["points"]] == [[[1.0, 2.0]], [], [[3.0, 4.0]] * 2]
    assert list(ds[:]["last"]) == [b"x", b"yy", b""]


def test_what_cannot_be_mapped_says_why(tmp_path: Path) -> None:
    table = pa.table({"x": np.arange(1000)})
    with pytest.raises(FormatError, match=r"its buffers are compressed.*`penstock prepare`"):
        penstock.open(write_ipc(tmp_path / "x.arrow", table, compression="zstd"))
    whole = write_ipc(tmp_path / "x.arrow", table).read_bytes()
    (tmp_path / "x.arrow").write_bytes(whole[:-8])
    with pytest.raises(FormatError, match="it ends without an end mark, as if its writer had been killed"):
        penstock.open(tmp_path / "x.arrow")
    with pytest.raises(FormatError, match=r"column of type string_view"):
        penstock.open(write_ipc(tmp_path / "x.arrow", pa.table({"v": pa.array(["a"], pa.string_view())})))
    (tmp_path / "x.arrow").write_bytes(b"no Arrow at all, but some text")
    with pytest.raises(FormatError, match="no message begins here"):
        penstock.open(tmp_path / "x.arrow")
    saved(tmp_path / "parts" / "train", 3)
    (tmp_path / "parts" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(FormatError, match=r"the parts 'train' of a dataset\. Open one: .*parts/train"):
        penstock.open(tmp_path / "parts")
    with pytest.raises(FileNotFoundError, match=r"x\.arow.*Did you mean"):
        penstock.open(str(tmp_path / "x.arow"), format="arrow")


def test_names_of_columns_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = write_ipc(tmp_path / "x.arrow", pa.table({"name": [1], "more": [{"inner": 1}]}))
    for name in (b"name", b"inner"):
        (tmp_path / "y.arrow").write_bytes(path.read_bytes().replace(name, b"\x8c" + name[1:]))
        with pytest.raises(FormatError, match=r"this is not an Arrow IPC file that can be mapped: .*can't decode"):
            penstock.open(tmp_path / "y.arrow")


def test_files_that_changed_are_noticed(tmp_path: Path) -> None:
    path = write_ipc(tmp_path / "x.arrow", pa.table({"x": np.arange(1000)}))
    ds = penstock.open(path)
    assert ds[[3]]["x"].tolist() == [3]
    pickled = pickle.dumps(ds)
    assert pickle.loads(pickled)[999]["x"] == 999
    write_ipc(tmp_path / "new.arrow", pa.table({"x": np.arange(1000) + 1})).rename(path)
    with pytest.raises(DatasetChanged, match=r"x\.arrow: a file changed since it was opened"):
        pickle.loads(pickled)
    fresh = penstock.open(path)
    with open(path, "r+b") as file:
        file.truncate(300)
    with pytest.raises(StorageError, match="the file has 300 bytes"):
        fresh[[5]]


def read_all(path: Path) -> None:
    ds = penstock.open(path, on_error="skip")
    for name in ds.schema:
        try:
            ds.select_columns(name)[:]
        except (MemoryError, FormatError):
            continue
    for index in range(min(3, len(ds))):
        ds[index]
    if len(ds) and "tokens" in ds.schema and ds.schema["tokens"].spec == "int32[*]":
        ds.lengths("tokens")
        ds.shuffle(seed=1).window(2).batch(1).read(0)
        ds.shuffle(seed=1).pack(8).batch(1).read(0)


def forged(folder: Path, generator: random.Random, example: bytes) -> Path:
    """A file with some bytes, or some whole numbers, replaced; or a part of it."""
    raw = bytearray(example)
    for _ in range(generator.choice([1, 1, 2, 5])):
        at = generator.randrange(len(raw) - 8)
        odd = generator.choice([2**63 - 1, 2**62, 2**31, 2**32 - 1, len(raw), 0, 1, 8, generator.randrange(2**64)])
        width = generator.choice([1, 2, 4, 8])
        raw[at : at + width] = (odd % 256**width).to_bytes(width, "little")
    if generator.random() < 0.1:
        del raw[generator.randrange(len(raw)) :]
    (folder / "forged.arrow").write_bytes(raw)
    return folder / "forged.arrow"


@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=pytest.mark.stress)])
def test_whatever_a_file_holds_it_is_read_or_refused(count: int, tmp_path: Path) -> None:
    documents = [list(range(length)) for length in (0, 3, 9, 1, 4, 0, 2)]
    table = pa.table(
        {
            "tokens": pa.array(documents, pa.list_(pa.int32())),
            "s": ["a", "", "ccc", None, "e", "f", "gg"],
            "b": [True] * 7,
            "x": pa.array([[1.0, 2.0]] * 7, pa.list_(pa.float32(), 2)),
        }
    )
    example = write_ipc(tmp_path / "example.arrow", table, rows=3).read_bytes()
    generator = random.Random(0)
    for _ in range(count):
        path = forged(tmp_path, generator, example)
        with guarded():
            use_or_refuse(lambda path=path: read_all(path))


def test_offsets_that_overlap_or_lead_outside_are_refused(tmp_path: Path) -> None:
    path = write_ipc(tmp_path / "x.arrow", pa.table({"tokens": [[1], [2, 3], [4]]}))
    whole = path.read_bytes()
    at = whole.rindex(np.array([0, 1, 3, 4], "<i4").tobytes())
    for wrong in ([0, 3, 1, 4], [0, 1, 3, 5], [-1, 1, 3, 4], [0, 2**31 - 1, 3, 4]):
        path.write_bytes(whole[:at] + np.array(wrong, "<i4").tobytes() + whole[at + 16 :])
        ds = penstock.open(path)
        for use in (lambda ds=ds: ds[1], lambda ds=ds: ds[[1]], lambda ds=ds: ds.lengths("tokens")):
            assert "the offsets of column 'tokens' decrease or exceed its values" in (error_of(use) or "")

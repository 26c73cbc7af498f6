from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import FormatError, PenstockError, SchemaError
from penstock.sources import SourceOptions, list_files, plan_splits, read_split

from .gathering import gather, values

ParquetFile = pq.ParquetFile


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    for name, write in (("a.parquet", write_parquet), ("a.arrow", write_arrow_file)):
        write(tmp_path / name, table, 1)
        with pytest.raises(SchemaError, match=f"{name}: more than one column is called 'text'"):
            gather(tmp_path / name)


def table_of(num_rows: int) -> pa.Table:
    return pa.table({"id": range(num_rows), "text": [None if n % 7 == 3 else f"document {n}" for n in range(num_rows)]})


@pytest.mark.parametrize("kind", ["float16", "float32", "float64"])
def test_missing_floats_are_nan_if_asked_for_and_nothing_else_is(tmp_path: Path, kind: str) -> None:
    floats = pa.array(np.array([1.5, 0, 2]), pa.type_for_alias(kind), mask=np.array([False, True, False]))
    table = pa.table({"x": floats, "id": [1, None, 3], "text": ["a", None, "c"]})
    for name, write in (("a.parquet", write_parquet), ("a.arrow", write_arrow_file)):
        write(tmp_path / name, table, 1)
        rows, _ = gather(tmp_path / name)
        assert [row["x"] for row in rows] == [1.5, None, 2]
        filled, _ = gather(tmp_path / name, missing="nan")
        assert str([row["x"] for row in filled]) == "[1.5, nan, 2.0]"
        assert [(row["id"], row["text"]) for row in filled] == [(1, "a"), (None, None), (3, "c")]


def write_parquet(path: Path, table: pa.Table, rows: int) -> None:
    pq.write_table(table, path, row_group_size=rows)


def write_arrow_file(path: Path, table: pa.Table, rows: int) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)


def write_arrow_stream(path: Path, table: pa.Table, rows: int) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)


WRITERS = [(write_parquet, "parquet"), (write_arrow_file, "arrow"), (write_arrow_stream, "arrow")]
Writer = Callable[[Path, pa.Table, int], None]
each_format = pytest.mark.parametrize(("write", "suffix"), WRITERS, ids=["parquet", "file", "stream"])


@each_format
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 60), st.integers(1, 20), st.integers(1, 2000), st.integers(1, 2000))
def test_every_row_comes_exactly_once_for_any_target(
    tmp_path_factory: pytest.TempPathFactory, write: Writer, suffix: str, num: int, group: int, target: int, batch: int
) -> None:
    path = tmp_path_factory.getbasetemp() / f"{write.__name__}.{suffix}"
    write(path, table_of(num), group)
    assert gather(path, target_bytes=target, batch_bytes=batch) == (table_of(num).to_pylist(), [])


@each_format
def test_big_files_are_cut_and_only_wanted_columns_are_read(tmp_path: Path, write: Writer, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    write(path, table_of(1000), 100)
    options = SourceOptions(columns=("text",))
    splits = plan_splits(list_files(path, options), options, 1)
    assert [(split.begin, split.end) for split in splits] == [(n, n + 1) for n in range(10)]
    assert gather(path, columns=("text",))[0] == [{"text": text} for text in table_of(1000)["text"].to_pylist()]
    with pytest.raises(SchemaError, match=r"no column 'body'; the file has 'id', 'text'"):
        gather(path, columns=("body",))


@each_format
def test_rows_of_invalid_utf8_are_named_and_the_rest_is_kept(tmp_path: Path, write: Writer, suffix: str) -> None:
    texts = pa.array([b"a", b"\xff", None, b"b", b"\xc3"], pa.binary()).view(pa.string())
    write(tmp_path / f"a.{suffix}", pa.table({"text": texts, "id": range(5)}), 5)
    rows, errors = gather(tmp_path)
    assert rows == [{"text": "a", "id": 0}, {"text": None, "id": 2}, {"text": "b", "id": 3}]
    assert [(error.row, error.reason) for error in errors] == [(1, "invalid_utf8"), (4, "invalid_utf8")]


@each_format
def test_dictionaries_and_views_come_as_plain_strings(tmp_path: Path, write: Writer, suffix: str) -> None:
    words = ["a", "b", None, "a"]
    table = pa.table({"one": pa.array(words).dictionary_encode(), "two": pa.array(words, pa.large_string())})
    if suffix == "arrow":
        table = table.append_column("three", pa.array(words, pa.string_view()))
    write(tmp_path / f"a.{suffix}", table, 4)
    rows, _ = gather(tmp_path)
    assert all(values(rows, name) == words for name in table.column_names)


@each_format
def test_truncated_files_are_named(tmp_path: Path, write: Writer, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    write(path, table_of(1000), 100)
    whole = path.read_bytes()
    for size in (0, 3, 100, len(whole) // 2, len(whole) - 20):
        path.write_bytes(whole[:size])
        with pytest.raises(FormatError, match=rf"a\.{suffix}: the \w+ file is truncated or damaged"):
            gather(path)


@each_format
def test_flipped_bits_give_an_error_or_values_but_never_a_crash(tmp_path: Path, write: Writer, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    write(path, table_of(300), 100)
    whole, chooser = path.read_bytes(), random.Random(5)
    for _ in range(100):
        damaged = bytearray(whole)
        damaged[chooser.randrange(len(whole))] ^= 1 << chooser.randrange(8)
        path.write_bytes(damaged)
        try:
            rows, errors = gather(path, target_bytes=2000)
        except PenstockError:
            continue
        assert len(rows) + len(errors) <= 300


def test_page_checksums_are_verified_where_they_are(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"n": np.random.default_rng(1).integers(0, 1 << 60, 10_000)})
    pq.write_table(table, path, compression="none", use_dictionary=False, write_page_checksum=True)
    damaged = bytearray(path.read_bytes())
    damaged[40_000] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(FormatError, match="CRC"):
        gather(path)


def test_a_batch_is_bounded_though_few_bytes_are_stored(tmp_path: Path) -> None:
    table = pa.table({"text": pa.array(["x" * 10_000] * 2000)})  # a dictionary of one value: 20 MB out of 10 kB
    pq.write_table(table, tmp_path / "a.parquet")
    options = SourceOptions(batch_bytes=1 << 20)
    from penstock.sources import read_split

    [split] = plan_splits(list_files(tmp_path, options), options, 1 << 30)
    sizes = [records.columns["text"].nbytes for records in read_split(split, options)]
    assert max(sizes) <= 3 << 20


def test_an_ordinary_row_group_is_one_batch_and_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    monkeypatch.setattr(pq, "ParquetFile", lambda *given, **named: opened.append(1) or ParquetFile(*given, **named))
    table = pa.table({"text": [f"{number} " * (number % 500) for number in range(2000)]})
    write_parquet(tmp_path / "a.parquet", table, 1000)
    options = SourceOptions()
    (split,) = plan_splits(list_files(str(tmp_path / "a.parquet"), options), options, 1 << 30)
    opened.clear()
    assert [records.num_rows for records in read_split(split, options)] == [1000, 1000]
    assert len(opened) == 1


def test_hugging_face_datasets_are_read_from_disk_and_as_objects(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="pip install datasets")
    rows = [{"text": f"document {n}", "id": n} for n in range(1000)]
    dataset = datasets.Dataset.from_list(rows)
    dataset.save_to_disk(str(tmp_path / "saved"), num_shards=3)
    assert gather(tmp_path / "saved", target_bytes=5000) == (rows, [])
    loaded = datasets.load_from_disk(str(tmp_path / "saved"))
    assert {file.path.endswith(".arrow") for file in list_files(loaded, SourceOptions())} == {True}
    for each, expected in (
        (loaded, rows),
        (dataset, rows),
        (loaded.select(range(10, 20)), rows[10:20]),
        (loaded.select([5, 3, 900]), [rows[5], rows[3], rows[900]]),
        (loaded.to_iterable_dataset(), rows),
    ):
        assert gather(each, target_bytes=5000)[0] == expected
    datasets.DatasetDict({"train": dataset}).save_to_disk(str(tmp_path / "parts"))
    with pytest.raises(ValueError, match="parts train"):
        gather(tmp_path / "parts")
    with pytest.raises(ValueError, match="the parts 'train'"):
        gather(datasets.DatasetDict({"train": dataset}))


def test_a_hugging_face_dataset_whose_columns_were_replaced_is_not_read_from_its_old_files(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="pip install datasets")
    old = [{"id": n, "score": n + 10} for n in range(20)]
    datasets.Dataset.from_list(old).save_to_disk(str(tmp_path / "saved"), num_shards=2)
    loaded = datasets.load_from_disk(str(tmp_path / "saved"))
    replaced = loaded.remove_columns("score").add_column("score", list(range(50, 70)))
    swapped = loaded.rename_columns({"id": "score", "score": "id"}).select_columns(["id", "score"])
    for each in (replaced, swapped):
        assert each.column_names == loaded.column_names
        assert each.cache_files
        assert gather(each, target_bytes=100)[0] == list(each)
    described = loaded.cast_column("score", datasets.ClassLabel(num_classes=70))
    assert gather(described, target_bytes=100)[0] == old


def test_a_hugging_face_dataset_with_a_transform_is_refused_rather_than_read_without_it(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="pip install datasets")
    plain = datasets.Dataset.from_list([{"id": n} for n in range(3)])
    doubled = plain.with_transform(lambda batch: {"id": [2 * value for value in batch["id"]]})
    with pytest.raises(ValueError, match="has a transform"):
        gather(doubled)
    assert gather(doubled.with_format(None))[0] == list(plain)


def test_a_saved_dataset_cannot_name_files_outside_its_folder(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "../secret.arrow"}]}')
    with pytest.raises(FormatError, match="outside the folder"):
        gather(tmp_path)


@each_format
def test_a_damaged_file_may_be_kept_as_one_split_that_fails_when_it_is_read(
    tmp_path: Path, write: Writer, suffix: str
) -> None:
    path, options = tmp_path / f"a.{suffix}", SourceOptions()
    write(path, table_of(50), 10)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    files = list_files(path, options)
    with pytest.raises(FormatError, match="truncated or damaged"):
        plan_splits(files, options, 1)
    [split] = plan_splits(files, options, 1, keep_damaged=True)
    with pytest.raises(FormatError, match="truncated or damaged"):
        list(read_split(split, options))
    path.write_bytes(whole)
    assert sum(records.num_rows for records in read_split(split, options)) == 50

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock.errors import FormatError
from penstock.sources import IterableSource, SourceOptions, Split, list_files, peek_split, plan_splits, read_split

from .gathering import gather, values


def write(path: Path, data: bytes = b"x\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def names(sources: Any, root: Path, **options: Any) -> list[str]:
    return [os.path.relpath(file.path, root) for file in list_files(sources, SourceOptions(**options))]


def test_folders_globs_lists_and_urls_give_each_file_once_sorted_by_name(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "deep/c.jsonl", "_SUCCESS", ".hidden.jsonl", "README.md", "_tmp/d.jsonl"):
        write(tmp_path / name)
    everything = ["a.jsonl", "b.jsonl", "deep/c.jsonl"]
    assert names(tmp_path, tmp_path) == everything
    assert names(str(tmp_path), tmp_path) == everything
    assert names(f"file://{tmp_path}", tmp_path) == everything
    assert names([tmp_path / "b.jsonl", f"{tmp_path}/*.jsonl"], tmp_path) == ["a.jsonl", "b.jsonl"]
    assert names(f"{tmp_path}/**/*.jsonl", tmp_path) == ["_tmp/d.jsonl", *everything]


def test_a_source_that_is_given_twice_is_read_once_and_said_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(write(tmp_path / "a.jsonl"))
    assert names([path, f"{tmp_path}/*.jsonl"], tmp_path) == ["a.jsonl"]
    assert not caplog.messages
    assert names([path, path], tmp_path) == ["a.jsonl"]
    assert f"{path} is given 2 times; each file is read once" in caplog.text


def test_a_hugging_face_dataset_joined_with_itself_has_its_rows_twice(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["a", "b"]}).save_to_disk(tmp_path)
    once = datasets.load_from_disk(str(tmp_path))
    twice = datasets.concatenate_datasets([once, once])
    rows, _ = gather(twice)
    assert values(rows) == ["a", "b", "a", "b"]
    assert len(list_files(twice, SourceOptions())) == 1  # not its file twice, which no task could tell apart


def test_a_hugging_face_dataset_that_is_given_twice_is_read_once_and_said_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["a", "b"]}).save_to_disk(tmp_path)
    once = datasets.load_from_disk(str(tmp_path))
    rows, _ = gather([once, once, str(tmp_path)])
    assert values(rows) == ["a", "b"]
    assert "is given 2 times" in caplog.text


def test_a_name_that_is_no_utf_8_is_an_error_that_shows_it(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt")).write_bytes(b"x")
    with pytest.raises(ValueError, match=r"caf\\udce9\.txt': the name is not UTF-8"):
        names(tmp_path, tmp_path)


@pytest.mark.parametrize("suffix", ["avif", "jp2", "ppm", "pgm", "jfif", "JPG"])
def test_what_can_be_decoded_is_an_image_by_its_name(tmp_path: Path, suffix: str) -> None:
    write(tmp_path / f"a.{suffix}"), write(tmp_path / "b.png")
    assert names(tmp_path, tmp_path) == [f"a.{suffix}", "b.png"]


def test_names_that_tell_no_format_or_several_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.xyz")
    with pytest.raises(ValueError, match=r"a\.xyz: unrecognised file extension"):
        names(tmp_path / "a.xyz", tmp_path)
    assert names(tmp_path / "a.xyz", tmp_path, format="text") == ["a.xyz"]
    write(tmp_path / "b.csv"), write(tmp_path / "c.jsonl")
    with pytest.raises(ValueError, match=r"several formats \(1 csv, 1 jsonl: .*/c\.jsonl\)"):
        names(tmp_path, tmp_path)
    assert names([tmp_path / "b.csv", tmp_path / "c.jsonl"], tmp_path) == ["b.csv", "c.jsonl"]


def test_a_stray_file_is_named_with_the_way_to_leave_it_out(tmp_path: Path) -> None:
    write(tmp_path / "0.png"), write(tmp_path / "1.png"), write(tmp_path / "notes.txt")
    with pytest.raises(ValueError, match=r"\(2 images, 1 text: .*/notes\.txt\).*--format images"):
        names(tmp_path, tmp_path)
    assert names(tmp_path, tmp_path, format="images") == ["0.png", "1.png"]


def test_a_folder_of_files_that_nobody_reads_says_what_they_are(tmp_path: Path) -> None:
    write(tmp_path / "0.docx"), write(tmp_path / "1.docx")
    with pytest.raises(FileNotFoundError, match=r"no file has a recognised extension \(2 \.docx\).*rows as dicts"):
        names(tmp_path, tmp_path)


@pytest.mark.parametrize("source", ["nothing.jsonl", "*.parquet", "folder"])
def test_a_source_that_matches_nothing_is_an_error(tmp_path: Path, source: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no file matches|the folder has no files"):
        names(str(tmp_path / source), tmp_path)


def test_what_is_no_source_is_refused() -> None:
    for wrong in (5, {"text": "x"}, None):
        with pytest.raises(TypeError, match="A source is a path"):
            list_files(wrong, SourceOptions())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="empty"):
        list_files([], SourceOptions())


def test_a_link_to_nothing_is_an_error_and_no_file_less(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").symlink_to("gone.jsonl")
    for source in (tmp_path, f"{tmp_path}/*.jsonl", tmp_path / "b.jsonl"):
        with pytest.raises(FileNotFoundError, match=r"b\.jsonl: a link to gone\.jsonl, which does not exist"):
            names(source, tmp_path)


def test_brackets_in_a_glob_are_explained(tmp_path: Path) -> None:
    write(tmp_path / "a [1]" / "b [2].jsonl")
    assert names(tmp_path / "a [1]" / "b [2].jsonl", tmp_path) == ["a [1]/b [2].jsonl"]
    with pytest.raises(FileNotFoundError, match=r"In a glob, write \[\[\] for a bracket"):
        names(f"{tmp_path}/a [1]/*.jsonl", tmp_path)
    assert names(f"{tmp_path}/a [[]1]/*.jsonl", tmp_path) == ["a [1]/b [2].jsonl"]


def test_a_dataset_of_ours_is_no_raw_data(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl"), write(tmp_path / "data" / "run.json")
    assert names(tmp_path, tmp_path) == ["a.jsonl", "data/run.json"]
    write(tmp_path / "data" / "manifest.json", b'{\n "format": "penstock",\n')
    assert names(tmp_path, tmp_path) == names(f"{tmp_path}/**/*.json*", tmp_path) == ["a.jsonl"]
    with pytest.raises(ValueError, match="a dataset that Penstock wrote"):
        names(tmp_path / "data", tmp_path)


def test_links_to_files_are_followed_and_links_in_a_circle_end(tmp_path: Path) -> None:
    write(tmp_path / "store" / "blob", b"{}\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").symlink_to(tmp_path / "store" / "blob")
    (tmp_path / "data" / "again").symlink_to(tmp_path / "data")
    assert names(tmp_path / "data", tmp_path) == ["data/a.jsonl"]


def test_the_identity_of_a_file_changes_with_its_content(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b"one")
    [before] = list_files(path, SourceOptions())
    os.utime(path, ns=(5, 5))
    [after] = list_files(path, SourceOptions())
    assert (before.num_bytes, after.num_bytes) == (3, 3)
    assert before.identity != after.identity


def test_a_split_survives_json_and_a_plan_is_the_same_every_time(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", b'{"text": "x"}\n' * 1000)
    options = SourceOptions()
    splits = plan_splits(list_files(tmp_path, options), options, 1000)
    assert len(splits) == 14
    assert [Split.from_json(json.loads(json.dumps(split.to_json()))) for split in splits] == splits
    assert plan_splits(list_files(tmp_path, options), options, 1000) == splits
    with pytest.raises(ValueError, match="target_bytes=0"):
        plan_splits([], options, 0)


def test_iterables_of_dicts_come_in_order_with_arrays_where_types_agree() -> None:
    image = np.zeros((2, 2), np.uint8)
    items = [{"text": f"t{n}", "n": n, "raw": b"x", "image": image, "mixed": n if n % 2 else "s"} for n in range(100)]
    rows, errors = gather(items, batch_bytes=50)
    assert not errors
    assert values(rows) == [f"t{n}" for n in range(100)]
    assert values(rows, "raw") == [b"x"] * 100
    assert values(rows, "image")[7] is image
    [split] = plan_splits(list_files(items, SourceOptions()), SourceOptions(), 1)
    assert split.needs_this_process
    assert next(read_split(split, SourceOptions())).columns["text"].type == pa.string()


def test_items_that_are_no_dicts_or_no_text_are_bad_rows() -> None:
    source = IterableSource(records=[{"text": "a"}, "b", {"text": "\ud800"}, {"other": 1}])
    rows, errors = gather(source)
    assert values(rows) == ["a", None]
    assert [(error.row, error.reason) for error in errors] == [(1, "not_an_object"), (2, "invalid_utf8")]


def test_a_function_can_be_read_again_and_an_iterator_cannot() -> None:
    def produce() -> Iterator[dict[str, int]]:
        yield from ({"n": n} for n in range(3))

    for source, is_repeatable in ((IterableSource(records=produce), True), (produce(), False)):
        [split] = plan_splits(list_files(source, SourceOptions()), SourceOptions(), 1)
        assert sum(records.num_rows for records in read_split(split, SourceOptions())) == 3
        if is_repeatable:
            assert sum(records.num_rows for records in read_split(split, SourceOptions())) == 3
        else:
            with pytest.raises(FormatError, match="cannot be read again"):
                list(read_split(split, SourceOptions()))


def test_a_look_takes_nothing_from_an_iterator() -> None:
    options = SourceOptions(batch_bytes=100)
    [split] = plan_splits(list_files(({"n": n} for n in range(100)), options), options, 1)
    assert [next(peek_split(split, options)).num_rows for _ in range(2)] == [13, 13]
    assert sum(records.num_rows for records in peek_split(split, options)) == 100
    assert sum(records.num_rows for records in read_split(split, options)) == 100


def test_arrow_tables_are_cut_by_rows() -> None:
    table = pa.table({"text": [f"document {n}" for n in range(1000)], "n": range(1000)})
    options = SourceOptions(columns=("n",))
    assert len(plan_splits(list_files(table, options), options, table.nbytes // 10)) == 10
    assert gather(table, target_bytes=1000)[0] == table.to_pylist()
    assert gather(table, target_bytes=1000, columns=("n",))[0] == [{"n": n} for n in range(1000)]
    reader = pa.RecordBatchReader.from_batches(table.schema, table.to_batches(100))
    assert gather(reader)[0] == table.to_pylist()


def test_the_object_of_another_process_is_an_error() -> None:
    with pytest.raises(ValueError, match="object:0:gone is an object in the process that listed it"):
        list(read_split(Split("object", "object:0:gone", 0, -1, 0), SourceOptions()))


def test_importing_the_room_imports_neither_pyarrow_nor_fsspec() -> None:
    code = "import penstock.sources, sys; assert not {'pyarrow', 'fsspec', 'datasets'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

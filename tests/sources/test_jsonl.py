from __future__ import annotations

import gzip
import json
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import FormatError, StorageError
from penstock.sources import SourceOptions, Split, list_files, plan_splits, read_split

from .gathering import gather, read_checked, values

TEXT = st.text(st.characters(codec="utf-8"), max_size=30)
SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | TEXT
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3))
NAMES = st.sampled_from(["text", "id", "meta", "ü"])


def write(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)


def lines(*objects: Any) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in objects)


def without_missing(value: Any) -> Any:
    """A row without nulls: Arrow fills a missing field in with null, at any depth."""
    if isinstance(value, dict):
        return {name: without_missing(each) for name, each in value.items() if each is not None} or None
    if isinstance(value, list):
        return [without_missing(each) for each in value]
    return value


@settings(max_examples=70, deadline=None)
@given(st.lists(st.dictionaries(NAMES, TEXT, max_size=3), max_size=12), st.data())
def test_every_line_comes_exactly_once_for_any_target_and_any_newlines(
    tmp_path_factory: pytest.TempPathFactory, objects: list[dict[str, str]], data: st.DataObject
) -> None:
    ends = data.draw(st.lists(st.sampled_from([b"\n", b"\r\n", b"\n\n", b"\n \r\n"]), min_size=12, max_size=12))
    content = b"".join(json.dumps(each).encode() + end for each, end in zip(objects, ends, strict=False))
    if data.draw(st.booleans()):
        content = content.rstrip()
    path = write(tmp_path_factory.getbasetemp() / "once.jsonl", content)
    target, batch = data.draw(st.integers(1, 200)), data.draw(st.integers(1, 100))
    rows, errors = gather(path, target_bytes=target, batch_bytes=batch) if content else ([], [])
    assert not errors
    given_rows = Counter(json.dumps(each, sort_keys=True) for each in objects)
    assert Counter(json.dumps(without_missing(each) or {}, sort_keys=True) for each in rows) == given_rows


def test_the_last_line_of_a_split_is_in_the_batch_of_the_lines_before_it(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"n": n, "text": "x" * (n % 97)}) + "\n" for n in range(2_000)))
    options = SourceOptions()
    splits = plan_splits(list_files(str(path), options), options, 20_000)
    assert len(splits) > 4
    assert [len(list(read_split(split, options))) for split in splits] == [1] * len(splits)


@settings(max_examples=70, deadline=None)
@given(st.lists(st.dictionaries(NAMES, VALUES, max_size=3), max_size=6), st.integers(1, 100))
def test_values_are_those_of_the_json_module_whatever_their_types(
    tmp_path_factory: pytest.TempPathFactory, objects: list[dict[str, Any]], batch_bytes: int
) -> None:
    # Twice the same, so that the later blocks are read with the types of the earlier ones.
    objects = objects * 2
    path = write(tmp_path_factory.getbasetemp() / "values.jsonl", lines(*objects) or b"\n")
    rows, errors = gather(path, batch_bytes=batch_bytes)
    assert not errors
    assert [without_missing(each) for each in rows] == [without_missing(each) for each in objects]


def test_text_is_a_string_array_and_a_date_stays_text(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", lines({"text": "2020-01-01", "n": 1, "deep": {"day": "2020-01-01"}}))
    [records] = read_checked(Split("jsonl", path, 0, len(Path(path).read_bytes()), 0), SourceOptions())
    assert records.columns["text"].type == pa.string()
    assert records.columns["text"].to_pylist() == ["2020-01-01"]
    assert records.columns["deep"].to_pylist() == [{"day": "2020-01-01"}]


def test_integers_too_large_for_a_float_are_not_rounded(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", lines({"id": 2**53 + 1}, {"id": 0.5}) + lines({"id": 2**64 - 1}))
    assert values(gather(path)[0], "id") == [2**53 + 1, 0.5, 2**64 - 1]


def test_nulls_and_missing_fields_are_null(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", lines({"text": None}, {"text": "x"}, {"other": 1}))
    for columns in (None, ("text",)):
        assert values(gather(path, columns=columns)[0]) == [None, "x", None]
    assert values(gather(path, columns=("absent",))[0], "absent") == [None, None, None]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "x"', "bad_json"),
        (b'{"text": "x"} {"text": "y"}', "bad_json"),
        (b'{"text": "x"}{"text": "y"}', "bad_json"),
        (b'{"text": "\xff"}', "invalid_utf8"),
        (b'{"text": "\\ud800"}', "invalid_utf8"),
        (b'["x"]', "not_an_object"),
        (b'"x"', "not_an_object"),
        (b"\x00", "bad_json"),
        (b'{"text":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "bad_json"),
        (b'{"other":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}", "bad_json"),
    ],
    ids=str,
)
def test_a_bad_line_is_named_by_row_and_byte_and_costs_no_other(tmp_path: Path, line: bytes, reason: str) -> None:
    good = lines({"text": "a"}, {"text": "b"})
    path = write(tmp_path / "a.jsonl", good + b"\n" + line + b"\n" + good)
    for columns in (None, ("text",)):
        rows, [error] = gather(path, columns=columns)
        assert values(rows) == ["a", "b", "a", "b"]
        assert (error.path, error.row, error.reason) == (path, 2, reason)
        assert f"byte {len(good) + 1}" in error.message


def test_a_bad_line_is_found_after_many_good_blocks_too(tmp_path: Path) -> None:
    good = lines(*({"text": f"document {n}", "id": n} for n in range(2000)))
    path = write(tmp_path / "a.jsonl", good + b"{oops}\n" + b'{"text": "\xff"}\n' + good)
    rows, errors = gather(path, columns=("text",), batch_bytes=1000)
    assert len(rows) == 4000
    assert [(error.row, error.reason) for error in errors] == [(2000, "bad_json"), (2001, "invalid_utf8")]


def test_a_column_of_several_types_comes_as_python_values(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", lines({"text": "a"}, {"text": 5}, {"text": ["x"]}, {"text": True}))
    assert values(gather(path)[0]) == ["a", 5, ["x"], True]
    assert values(gather(path, batch_bytes=8, columns=("text",))[0]) == ["a", 5, ["x"], True]


def test_new_fields_inside_a_nested_column_are_not_lost_in_later_blocks(tmp_path: Path) -> None:
    turns = [{"messages": [{"role": "user", "content": str(n)}]} for n in range(20)]
    turns[15]["messages"][0]["tool"] = "search"
    path = write(tmp_path / "a.jsonl", lines(*turns))
    rows, _ = gather(path, columns=("messages",), batch_bytes=60)
    assert rows[15]["messages"][0]["tool"] == "search"


def test_a_byte_order_mark_is_dropped_and_an_empty_file_has_no_rows(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", b"\xef\xbb\xbf" + lines({"text": "a"}))
    write(tmp_path / "b.jsonl", b"")
    write(tmp_path / "c.jsonl", b"\n\r\n")
    assert gather(str(tmp_path)) == ([{"text": "a"}], [])


@pytest.mark.parametrize("name", ["gzip", "zstd", "bz2"])
def test_compressed_files_are_streamed_and_truncated_ones_named(tmp_path: Path, name: str) -> None:
    suffix = {"gzip": "gz", "zstd": "zst", "bz2": "bz2"}[name]
    content = lines(*({"text": f"{n * 7919 % 10_007}" * 5} for n in range(20_000)))
    packed = pa.compress(content, codec=name, asbytes=True) if name == "zstd" else _compress(content, name)
    path = write(tmp_path / f"a.jsonl.{suffix}", packed)
    assert len(gather(path, target_bytes=1000, batch_bytes=10_000)[0]) == 20_000
    cut = write(tmp_path / f"b.jsonl.{suffix}", packed[: len(packed) * 2 // 3])
    with pytest.raises(FormatError, match=rf"b\.jsonl\.{suffix}: the {name} data is truncated or damaged"):
        gather(cut)
    with pytest.raises(FormatError, match=rf"c\.jsonl\.{suffix}: the file is empty, not {name} data"):
        gather(write(tmp_path / f"c.jsonl.{suffix}", b""))


def _compress(content: bytes, name: str) -> bytes:
    import bz2

    return gzip.compress(content, 1) if name == "gzip" else bz2.compress(content)


def test_gzip_members_in_a_row_are_one_file_and_damage_inside_is_found(tmp_path: Path) -> None:
    part = gzip.compress(lines({"text": "a" * 1000}))
    assert len(gather(write(tmp_path / "a.jsonl.gz", part * 3))[0]) == 3
    damaged = bytearray(part)
    damaged[-6] ^= 1
    with pytest.raises(FormatError, match="damaged"):
        gather(write(tmp_path / "b.jsonl.gz", bytes(damaged)))


def test_a_line_over_the_limit_is_a_bad_row_and_is_not_kept(tmp_path: Path) -> None:
    content = lines({"text": "a"}, {"text": "x" * 50_000}, {"text": "b"})
    for name, data in (("a.jsonl", content), ("b.jsonl.gz", gzip.compress(content))):
        rows, [error] = gather(write(tmp_path / name, data), batch_bytes=1000, max_record_bytes=10_000)
        assert values(rows) == ["a", "b"]
        assert (error.row, error.reason) == (1, "too_long")


def test_memory_stays_within_a_few_times_one_huge_document(tmp_path: Path) -> None:
    size = 32 << 20
    path = write(tmp_path / "a.jsonl", lines({"text": "a"}, {"text": "x" * size}, {"text": "b"}))
    options = SourceOptions(columns=("text",))
    pa_before = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        lengths = []
        for split in plan_splits(list_files(path, options), options, 8 << 20):
            for records in read_split(split, options):
                lengths += [len(each) for each in records.columns["text"].to_pylist() if len(each) < 10]
                assert pa.total_allocated_bytes() - pa_before < 3 * size
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert lengths == [1, 1]
    assert peak < 5 * size


def test_a_file_that_shrank_since_it_was_listed_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", lines({"text": "a"}, {"text": "b"}))
    options = SourceOptions()
    [split] = plan_splits(list_files(path, options), options, 1000)
    write(tmp_path / "a.jsonl", lines({"text": "a"}))
    with pytest.raises(StorageError, match=r"a\.jsonl: the file has 14 bytes, but had at least 28"):
        list(read_split(split, options))
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(StorageError, match="the file was removed since it was listed"):
        list(read_split(split, options))


def test_utf_16_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"a": 1}\n'.encode("utf-16"))
    with pytest.raises(FormatError, match=r"a\.jsonl: the file is UTF-16\. Convert it first: iconv"):
        gather(path)

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import FormatError
from penstock.sources import SourceOptions, list_files, plan_splits

from .gathering import gather, read_checked, values


def write(path: Path, data: bytes) -> str:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(data)
    return str(path)


def split_as_python_does(text: str, separator: str) -> list[str]:
    pieces = text.split(separator)
    return pieces if pieces[-1] else pieces[:-1]


@settings(max_examples=120, deadline=None)
@given(
    st.text(st.sampled_from("ab\né"), max_size=60),
    st.sampled_from(["\n\n", "aa", "aba", "ab", "\n\n\n", "é", "a"]),
    st.integers(1, 40),
    st.integers(1, 20),
)
def test_documents_are_what_stands_between_separators_however_the_file_is_cut(
    tmp_path_factory: pytest.TempPathFactory, text: str, separator: str, target: int, batch_bytes: int
) -> None:
    path = write(tmp_path_factory.getbasetemp() / "separated.txt", text.encode())
    options = {"text_unit": "separator", "separator": separator, "batch_bytes": batch_bytes}
    rows, errors = gather(path, target_bytes=target, **options)
    assert not errors
    assert values(rows) == split_as_python_does(text, separator)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.text("abé \u2028", max_size=8), max_size=20), st.integers(1, 50), st.integers(1, 30), st.booleans())
def test_every_line_comes_exactly_once_with_empty_ones_and_without_carriage_returns(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], target: int, batch_bytes: int, is_windows: bool
) -> None:
    end = "\r\n" if is_windows else "\n"
    path = write(tmp_path_factory.getbasetemp() / "lines.txt", "".join(line + end for line in lines).encode())
    rows, _ = gather(path, target_bytes=target, text_unit="line", batch_bytes=batch_bytes)
    assert values(rows) == lines


def test_small_files_are_grouped_one_document_each(tmp_path: Path) -> None:
    for number in range(25):
        write(tmp_path / f"folder{number % 3}" / f"{number:03}.txt", f"document {number}\r\n".encode())
    write(tmp_path / "empty.txt", b"")
    options = SourceOptions(format="text")
    splits = plan_splits(list_files(tmp_path, options), options, 50_000)
    assert [len(split.paths) for split in splits] == [12, 12, 2]
    rows = [row for split in splits for records in read_checked(split, options) for row in _rows(records)]
    assert rows == sorted(rows)
    assert (str(tmp_path / "empty.txt"), "") in rows
    assert {text for _, text in rows} == {"", *(f"document {number}\r\n" for number in range(25))}


def _rows(records) -> list[tuple[str, str]]:
    return list(zip(records.columns["path"].to_pylist(), records.columns["text"].to_pylist(), strict=True))


def test_files_that_are_no_text_are_bad_rows_under_their_own_name(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", b"good")
    bad = write(tmp_path / "b.txt", b"bad \xff")
    long = write(tmp_path / "c.txt", b"x" * 200)
    write(tmp_path / "d.txt", b"\xef\xbb\xbfmarked")
    rows, errors = gather(tmp_path, max_record_bytes=100)
    assert values(rows) == ["good", "marked"]
    assert [(error.path, error.row, error.reason) for error in errors] == [
        (bad, 1, "invalid_utf8"),
        (long, 2, "too_long"),
    ]


def test_a_damaged_file_costs_no_other_of_its_group(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", b"good")
    wide = write(tmp_path / "b.txt", "text".encode("utf-16"))
    cut = write(tmp_path / "c.txt.gz", gzip.compress(b"text" * 100)[:-10])
    write(tmp_path / "d.txt.gz", gzip.compress(b"good too"))
    rows, errors = gather(tmp_path)
    assert values(rows) == ["good", "good too"]
    assert [(error.path, error.row, error.reason) for error in errors] == [
        (wide, 1, "damaged_file"),
        (cut, 2, "damaged_file"),
    ]
    assert [error.message[:20] for error in errors] == ["the file is UTF-16. ", "the gzip data is tru"]
    with pytest.raises(FormatError, match=r"b\.txt: the file is UTF-16"):
        gather(wide, text_unit="line")


def test_bad_lines_are_named_and_the_rest_is_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"\xef\xbb\xbfone\n\xfftwo\n" + b"x" * 5000 + b"\nthree")
    rows, errors = gather(path, text_unit="line", batch_bytes=100, max_record_bytes=1000)
    assert values(rows) == ["one", "three"]
    assert [(error.row, error.reason) for error in errors] == [(1, "invalid_utf8"), (2, "too_long")]


def test_compressed_text_is_read_by_line_and_by_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt.gz", gzip.compress(b"one\ntwo\n"))
    assert values(gather(path, text_unit="line")[0]) == ["one", "two"]
    assert values(gather(path)[0]) == ["one\ntwo\n"]


def test_one_byte_encodings_become_utf8(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "naïve§ÿ".encode("latin-1"))
    assert values(gather(path, encoding="latin-1")[0]) == ["naïve§ÿ"]
    rows, _ = gather(path, encoding="latin-1", text_unit="separator", separator="§")
    assert values(rows) == ["naïve", "ÿ"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encoding": "utf-16"}, "iconv -f utf-16"),
        ({"encoding": "shift_jis"}, "neither UTF-8 nor a one-byte encoding"),
        ({"encoding": "nonsense"}, "neither UTF-8 nor a one-byte encoding"),
        ({"text_unit": "separator"}, "give both"),
        ({"separator": "x"}, "give both"),
        ({"format": "xml"}, "the choices are None, 'parquet'"),
        ({"columns": ()}, "at least one"),
        ({"delimiter": ",,"}, "one ASCII character"),
        ({"delimiter": '"'}, "they must differ"),
        ({"batch_bytes": 0}, "at least 1"),
        ({"timeout_seconds": 0}, "must be positive"),
        ({"max_record_bytes": 1 << 31}, "less than 2 GiB"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SourceOptions(**options)


def test_one_string_is_no_list_of_columns() -> None:
    with pytest.raises(TypeError, match="is one string"):
        SourceOptions(columns="text")  # type: ignore[arg-type]

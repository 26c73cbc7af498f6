from __future__ import annotations

import csv
import gzip
import io
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import FormatError, SchemaError
from penstock.sources import SourceOptions, _csv_columns, list_files, plan_splits, read_split, resolve_types

from .gathering import gather, values

FIELDS = st.text(st.sampled_from('ab,"\n\r\té '), max_size=6)


def write(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)


@settings(max_examples=70, deadline=None)
@given(st.lists(st.tuples(FIELDS, FIELDS), max_size=10), st.integers(1, 100), st.sampled_from(["\n", "\r\n"]))
def test_fields_are_those_of_the_csv_module_with_any_quoting(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], batch_bytes: int, newline: str
) -> None:
    text = io.StringIO()
    csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator=newline).writerows([("x", "y"), *rows])
    path = write(tmp_path_factory.getbasetemp() / "quoted.csv", text.getvalue().encode())
    found, errors = gather(path, target_bytes=7, batch_bytes=batch_bytes)
    assert not errors
    assert [(row["x"], row["y"]) for row in found] == rows


@settings(max_examples=70, deadline=None)
@given(st.lists(st.text(st.sampled_from('ab"é '), min_size=1, max_size=9), max_size=12), st.integers(1, 60), st.data())
def test_every_record_comes_exactly_once_when_lines_are_records(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], target: int, data: st.DataObject
) -> None:
    end = data.draw(st.sampled_from([b"\n", b"\r\n"]))
    content = end.join([b"x\ty", *(f"{name}\t{n}".encode() for n, name in enumerate(names))])
    content += end if data.draw(st.booleans()) else b""
    path = write(tmp_path_factory.getbasetemp() / "lines.tsv", content)
    found, errors = gather(path, target_bytes=target, batch_bytes=data.draw(st.integers(1, 50)), quote=None)
    assert not errors
    assert Counter((row["x"], row["y"]) for row in found) == Counter((name, str(n)) for n, name in enumerate(names))


def test_a_file_with_quotes_is_one_split_and_one_without_is_cut(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", b"x,y\n" + b"1,2\n" * 100)
    for options, is_cut in (({}, False), ({"quote": None}, True), ({"quoted_newlines": False}, True)):
        settings = SourceOptions(**options)
        assert (len(plan_splits(list_files(path, settings), settings, 100)) > 1) is is_cut
        assert len(gather(path, target_bytes=100, **options)[0]) == 100


@pytest.mark.parametrize("options", [{}, {"quoted_newlines": False}], ids=str)
def test_rows_with_missing_or_extra_fields_are_named_and_the_rest_is_kept(tmp_path: Path, options: dict) -> None:
    path = write(tmp_path / "a.csv", b"x,y\n1,2\n3\n\n4,5\n6,7,8\n\xff,9\n10,11\n12\n")
    for batch_bytes in (5, 20, 1 << 20):
        rows, errors = gather(path, target_bytes=1 << 20, batch_bytes=batch_bytes, **options)
        assert values(rows, "x") == ["1", "4", "10"]
        found = [(error.row, error.reason) for error in errors]
        assert found == [(1, "wrong_fields"), (3, "wrong_fields"), (4, "invalid_utf8"), (6, "wrong_fields")]
        assert "has 1 fields, but the header has 2: '3'" in errors[0].message


def test_a_quote_that_is_never_closed_is_an_error_and_not_one_long_value(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", b'x,y\n1,"open\n' + b"2,b\n" * 100)
    with pytest.raises(FormatError, match=r"a\.csv: the last record opens a quote that is never closed"):
        gather(path)
    with pytest.raises(FormatError, match="does not end within 200 bytes"):
        gather(path, batch_bytes=100, max_record_bytes=200)
    assert len(gather(path, quote=None)[0]) == 101
    with pytest.raises(FormatError, match="never closed"):
        gather(path, columns=("x",))


def test_bad_rows_after_a_value_with_newlines_are_bad_rows_and_no_open_quote(tmp_path: Path) -> None:
    for end in (b"bad\n", b"b\n", b"a\nb", b"bad\n" * 50):
        rows, errors = gather(write(tmp_path / "a.csv", b'x,y\n1,"a\nb"\n' + end))
        assert values(rows, "y") == ["a\nb"]
        assert {error.reason for error in errors} == {"wrong_fields"}


@pytest.mark.parametrize("value", [b"open\nto the end", b'say ""so""\nand go on\n', b"a\n" + b"long\n" * 100])
def test_an_open_quote_is_found_whatever_it_swallowed(tmp_path: Path, value: bytes) -> None:
    with pytest.raises(FormatError, match="never closed"):
        gather(write(tmp_path / "a.csv", b'x,y\n1,2\n3,"' + value))


def test_a_record_larger_than_a_block_is_read_whole_and_no_row_comes_twice(tmp_path: Path) -> None:
    content = b"x,y\n" + b"1,2\n" * 50 + b"bad\n" + b'3,"' + b"long\n" * 2000 + b'"\n' + b"4,5\n" * 50
    rows, [error] = gather(write(tmp_path / "a.csv", content), batch_bytes=64)
    assert Counter(values(rows, "x")) == {"1": 50, "3": 1, "4": 50}
    assert rows[50]["y"] == "long\n" * 2000
    assert error.row == 50


def test_headers_tell_delimiters_columns_and_mistakes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", b'\xef\xbb\xbf"x","a\nb"\r\n1,2\r\n')
    assert gather(path)[0] == [{"x": "1", "a\nb": "2"}]
    assert gather(path, columns=("x",))[0] == [{"x": "1"}]
    with pytest.raises(SchemaError, match=r"a\.csv: no column 'text'; the header has 'x', 'a\\nb'"):
        gather(path, columns=("text",))
    with pytest.raises(SchemaError, match="it contains 'x' more than once"):
        gather(write(tmp_path / "b.csv", b"x,x\n1,2\n"))
    with pytest.raises(SchemaError, match=r"names 'x' more than once\. Give other names"):
        gather(write(tmp_path / "b.csv", b"x,x\n1,2\n"), header=True)
    assert gather(tmp_path / "b.csv", header=True, names=("x", "y"))[0] == [{"x": "1", "y": "2"}]
    with pytest.raises(SchemaError, match=r"the header has 'x;y'\. Are its fields separated by ';'"):
        gather(write(tmp_path / "c.csv", b"x;y\n"), columns=("x",))
    with pytest.raises(FormatError, match=r"utf16\.csv: the file is UTF-16"):
        gather(write(tmp_path / "utf16.csv", "x,y\n".encode("utf-16")))
    assert gather(write(tmp_path / "c.csv", b"x;y\n1;2\n"), delimiter=";")[0] == [{"x": "1", "y": "2"}]
    assert gather(write(tmp_path / "d.tsv", b"x\ty\n1\t\n"))[0] == [{"x": "1", "y": ""}]


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
@pytest.mark.parametrize("rows", ["ann{0}3{0}x\nbob{0}4{0}y\n", "ann{0}3,5{0}x\n"])
def test_fields_that_may_end_with_something_else_are_not_taken_for_one(
    tmp_path: Path, delimiter: str, rows: str
) -> None:
    content = f"name{delimiter}age{delimiter}text\n{rows.format(delimiter)}".encode()
    path = write(tmp_path / "a.csv", content)
    said = re.escape(f"delimiter={delimiter!r}) (--delimiter); if not, delimiter=','")
    for options in ({}, {"header": False}, {"names": ("name", "age", "text")}):
        with pytest.raises(SchemaError, match=said):
            gather(path, **options)
    assert gather(path, delimiter=delimiter)[0][0]["name"] == "ann"


def test_a_column_that_is_missing_may_be_one_of_several_with_spaces_between_them(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", b"name age text\nann 3 hi\n")
    with pytest.raises(SchemaError, match=r"Are its fields separated by ' '\? Then pass delimiter=' ' \(--delimiter\)"):
        gather(path, columns=("text",))
    assert gather(path, columns=("text",), delimiter=" ")[0] == [{"text": "hi"}]
    with pytest.raises(SchemaError, match="Did you mean 'full text'"):
        gather(write(tmp_path / "b.csv", b"full text\na b\n"), columns=("text",))


def test_numbers_with_spaces_between_them_are_not_taken_for_one_field(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", b"a b\n1 2\n3.5 -4\n")
    with pytest.raises(SchemaError, match=r"delimiter=' '\) \(--delimiter\); if not, delimiter=','"):
        gather(path)
    assert gather(path, delimiter=" ")[0][1] == {"a": "3.5", "b": "-4"}
    path = write(tmp_path / "names.csv", b"full name\nann lee\nbob 2\n")
    assert gather(path)[0][1] == {"full name": "bob 2"}


def test_one_column_of_text_with_other_separators_is_one_column(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", b"a; b\nyes\nso; it; is\n")
    assert [row["a; b"] for row in gather(path)[0]] == ["yes", "so; it; is"]
    path = write(tmp_path / "b.csv", b"a;b\n1;2\n")
    assert gather(path, delimiter=",")[0] == [{"a;b": "1;2"}]


def test_files_without_rows_have_none(tmp_path: Path) -> None:
    for number, content in enumerate((b"", b"\n\n", b"x,y", b"x,y\n", b"x,y\r\n\r\n")):
        path = write(tmp_path / f"{number}.csv", content)
        assert gather(path) == ([], [])
        assert gather(path, quote=None, columns=None) == ([], [])


def test_other_encodings_become_utf8(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "text\nnaïve\nÿ\n".encode("latin-1"))
    assert values(gather(path, encoding="latin-1")[0]) == ["naïve", "ÿ"]
    rows, [error] = gather(write(tmp_path / "b.csv", b"text\n\x81\nok\n"), encoding="cp1252")
    assert (values(rows), error.reason) == (["ok"], "invalid_utf8")


@pytest.mark.parametrize("options", [{}, {"quote": None}, {"quoted_newlines": False}])
def test_lines_that_end_with_a_carriage_return_alone_are_rows(tmp_path: Path, options: dict) -> None:
    path = write(tmp_path / "a.csv", b"x,y\r1,2\r3,4\r")
    assert gather(path, **options)[0] == [{"x": "1", "y": "2"}, {"x": "3", "y": "4"}]


def test_a_block_that_ends_between_return_and_newline_needs_no_larger_one(tmp_path: Path) -> None:
    rows = [{"x": f"{number:05}", "y": '"q\r\nr"'} for number in range(60_000)]
    content = b"x,y\r\n" + b"".join(f'{row["x"]},"""q\r\nr"""\r\n'.encode() for row in rows)
    path = write(tmp_path / "a.csv", content)
    assert gather(path, batch_bytes=1000, max_record_bytes=1000)[0] == rows


HEADERLESS = {
    "numbers": b"5.1,3.5,setosa\n4.9,3.0,setosa\n7.0,3.2,versicolor\n",
    "one line": b"5.1,3.5,setosa\n",
    "dates": b"2024-01-02,rain\n2024-01-03,sun\n",
    "URLs": b"https://a.org/1,cat\nhttps://a.org/2,dog\n",
    "truth values": b"true,cat\nfalse,dog\n",
    "a class that comes again": b"a fine film,positive\na bad film,negative\nthe best,positive\n",
    "the same twice": b"red,red\nblue,green\n",
    "a long text": b"word " * 60 + b",good\nshort,bad\n",
    "missing numbers": b"1,a\n,b\n3,c\n",
    "a byte order mark": b"\xef\xbb\xbf1,a\r\n2,b\r\n",
    "years above years": b"Ann,1990,1991\nBob,1985,1999\n",
    "years that come unevenly": b"Ann,1990,1991,2005\nBob,3,4,5\n",
    "years that fall": b"Ann,1991,1990\nBob,3,4\n",
    "years beside no name": b"1990,1991\n3,4\n",
    "years beside another number": b"Ann,7,1990,1991\nBob,8,3,4\n",
    "one year": b"Ann,1990\nBob,3\n",
    "years and no rows": b"Ann,1990,1991\n",
}
WITH_HEADER = {
    "names above numbers": b"x,y\n1,2\n3,4\n",
    "a number as name above text": b"id,2020\na,low\nb,high\n",
    "a blank line first": b"\nx,y\n1,2\n",
    "the index that pandas writes": b",x\n0,a\n1,b\n",
    "a name that is a value, beside one above numbers": b"n,y\n1,y\n2,n\n",
    "no rows": b"x,y\n",
    "years": b"country,code,1990,1991,1992\nFrance,FR,58.2,,58.9\nMali,ML,8.4,8.6,1987\n",
    "years, five apart": b"country,1990,1995\nFrance,58,59\nMali,8,9\n",
    "only text": b"text,label\na fine film,positive\na bad one,negative\n",
}


@pytest.mark.parametrize("options", [{}, {"quote": None}, {"batch_bytes": 7}, {"quoted_newlines": False}], ids=str)
@pytest.mark.parametrize("name", HEADERLESS)
def test_a_first_line_that_may_be_data_is_refused_until_someone_says_what_it_is(
    tmp_path: Path, name: str, options: dict
) -> None:
    path = write(tmp_path / "a.csv", HEADERLESS[name])
    with pytest.raises(SchemaError, match=r"a\.csv: the first line may be data.*header=False.*header=True"):
        gather(path, **options)
    rows, errors = gather(path, header=False, **options)
    num_lines = len(HEADERLESS[name].splitlines())
    assert (len(rows), errors) == (num_lines, [])
    assert list(rows[0]) == [f"f{place}" for place in range(len(rows[0]))]
    names = tuple("abcdef"[: len(rows[0])])
    assert [tuple(row) for row in gather(path, header=False, names=names, **options)[0]] == [names] * num_lines
    if name != "the same twice":
        assert len(gather(path, header=True, **options)[0]) == num_lines - 1


def test_quoted_numbers_in_the_first_line_are_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", b'\xef\xbb\xbf"1","a\nb"\r\n"2","c"\r\n')
    with pytest.raises(SchemaError, match=r"'1' is a number, as are the values below it"):
        gather(path)
    assert gather(path, header=False)[0] == [{"f0": "1", "f1": "a\nb"}, {"f0": "2", "f1": "c"}]


@pytest.mark.parametrize("name", WITH_HEADER)
def test_a_header_is_not_doubted_for_nothing(tmp_path: Path, name: str) -> None:
    content = WITH_HEADER[name]
    rows, errors = gather(write(tmp_path / "a.csv", content))
    assert (len(rows), errors) == (len(content.strip().splitlines()) - 1, [])


@pytest.mark.parametrize("suffix", ["csv", "tsv", "csv.gz"])
def test_every_range_of_a_file_without_a_header_gives_its_own_rows(tmp_path: Path, suffix: str) -> None:
    delimiter = "\t" if suffix == "tsv" else ","
    content = "".join(f"{number}{delimiter}n{number}\n" for number in range(500)).encode()
    path = write(tmp_path / f"a.{suffix}", gzip.compress(content) if suffix.endswith("gz") else content)
    expected = [{"number": str(number), "text": f"n{number}"} for number in range(500)]
    for options in ({}, {"quote": None}):
        found = gather(path, target_bytes=100, names=("number", "text"), **options)
        assert (sorted(found[0], key=lambda row: int(row["number"])), found[1]) == (expected, [])


def test_names_for_a_file_that_has_some_are_refused_until_someone_says_so(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", b"x,y\n1,a\n2,b\n")
    with pytest.raises(
        SchemaError, match=r"the first line may be a header: it contains 'x'\. If it is, pass header=True"
    ):
        gather(path, names=("x", "z"))
    with pytest.raises(SchemaError, match=r"may be a header: 'x' is above nothing but numbers"):
        gather(path, names=("number", "text"))
    with pytest.raises(SchemaError, match=r"names= has 3 names, but the first line 2 fields"):
        gather(path, names=("a", "b", "c"))
    assert values(gather(path, names=("n", "t"), header=True)[0], "n") == ["1", "2"]
    assert values(gather(path, names=("n", "t"), header=False)[0], "n") == ["x", "1", "2"]


def test_fields_have_the_types_that_are_given_and_those_that_do_not_fit_are_bad_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", b"id,score,good\n007, 1.5,true\n2,,False\n300,x,true\n4,nan,maybe\n")
    types = {"id": "uint8", "score": "float32", "good": "bool"}
    for batch_bytes in (10, 1 << 20):
        rows, errors = gather(path, types=types, batch_bytes=batch_bytes)
        assert rows == [{"id": 7, "score": 1.5, "good": True}, {"id": 2, "score": None, "good": False}]
        assert [error.row for error in errors] == [2, 3]
        assert "column 'id' of row 2 of the split holds '300'; uint8 was expected" in errors[0].message
        assert "'maybe'; bool was expected" in errors[1].message
    rows, errors = gather(path, types={"score": "float64"}, missing="nan", null_values=("", "x"))
    assert not errors
    assert [str(row["score"]) for row in rows] == ["1.5", "nan", "nan", "nan"]
    with pytest.raises(SchemaError, match=r"no column 'rank'; the header has 'id', 'score', 'good'"):
        gather(path, types={"rank": "int8"})
    with pytest.raises(ValueError, match=r"types\['id'\]='integer'; the choices are 'text', 'bool', 'int8'"):
        SourceOptions(types={"id": "integer"})  # type: ignore[dict-item]


def test_types_come_from_the_first_rows_and_hold_for_all_files(tmp_path: Path) -> None:
    write(tmp_path / "0.csv", b"n,x,zip,good,text\n")
    write(tmp_path / "1.csv", b"n,x,zip,good,text\n1,2,02134,true,a\n-2,2.5e3,10115,FALSE,7\n")
    write(tmp_path / "2.csv", b"text,good,zip,x,n\nb,true,1,1,1\nc,true,1,1,1.5\n")
    options = SourceOptions(types="infer")
    settled = resolve_types(list_files(tmp_path, options), options)
    assert settled.types == {"n": "int64", "x": "float64", "good": "bool"}
    rows, [error] = gather(tmp_path, types=settled.types)
    assert rows[0] == {"n": 1, "x": 2.0, "zip": "02134", "good": True, "text": "a"}
    assert rows[-1] == {"text": "b", "good": True, "zip": "1", "x": 1.0, "n": 1}
    assert "'1.5'; int64 was expected (types=, --types). Is it right?" in error.message
    assert error.message.endswith("Then the column needs another type: types={'n': 'float64'}.")


def test_whole_numbers_are_never_rounded_by_the_type_inferred(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.csv",
        b"id,least,hash,large,minus\n"
        b"9007199254740993,-9223372036854775808,18446744073709551615,18446744073709551616,-1\n"
        b"9223372036854775807,0,0,0,18446744073709551615\n",
    )
    options = SourceOptions(types="infer")
    settled = resolve_types(list_files(path, options), options)
    assert settled.types == {"id": "int64", "least": "int64", "hash": "uint64"}
    rows, errors = gather(path, types=settled.types)
    assert not errors
    assert [row["id"] for row in rows] == [2**53 + 1, 2**63 - 1]
    assert rows[0]["hash"] == 2**64 - 1
    assert rows[0]["large"] == str(2**64)


@pytest.mark.parametrize("options", [{}, {"quoted_newlines": False}, {"quote": None}])
def test_batches_say_how_much_of_the_file_they_were_made_of(tmp_path: Path, options: dict) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a,b\n" + "1,2\n" * 5000)
    reading = SourceOptions(batch_bytes=1000, **options)
    splits = plan_splits(list_files(str(path), reading), reading, 1 << 20)
    sizes = [records.num_bytes for split in splits for records in read_split(split, reading)]
    assert len(sizes) > 10
    assert path.stat().st_size - 4 <= sum(sizes) <= path.stat().st_size


def test_a_number_too_large_for_its_type_is_a_bad_row_and_not_infinite(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,x\na,0.5\nb,1e39\nc,inf\nd,-1e400\ne,\n")
    rows, errors = gather(tmp_path / "a.csv", types={"x": "float32"})
    assert rows == [{"id": "a", "x": 0.5}, {"id": "c", "x": float("inf")}, {"id": "e", "x": None}]
    assert ["types={'x': 'float64'}" in error.message for error in errors] == [True, False]
    rows, errors = gather(tmp_path / "a.csv", types={"x": "float64"})
    assert [row["x"] for row in rows] == [0.5, 1e39, float("inf"), None]
    assert [error.row for error in errors] == [3]


def test_large_numbers_some_of_which_are_missing_stay_text(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", b"id,age\n9007199254740993,9007199254740992\n,\n")
    options = SourceOptions(types="infer", missing="nan")
    assert resolve_types(list_files(path, options), options).types == {"age": "float64"}


def test_missing_numbers_make_no_column_text(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", b"age,fare\n22,7.25\n,NA\n26,7\n")
    for missing, expected in (("null", "int64"), ("nan", "float64")):
        options = SourceOptions(types="infer", null_values=("", "NA"), missing=missing)
        assert resolve_types(list_files(path, options), options).types == {"age": expected, "fare": "float64"}


@pytest.mark.timeout(60)
def test_a_header_of_very_many_names_takes_no_time_that_grows_with_their_square() -> None:
    names = tuple(f"c{number}" for number in range(200_000))
    _csv_columns._check_is_header(names, [("1",) * len(names)], "a.csv")
    _csv_columns._check_names(names, "a.csv", SourceOptions())
    with pytest.raises(SchemaError, match="'c0', 'c7' more than once"):
        _csv_columns._check_names((*names, "c7", "c0"), "a.csv", SourceOptions())

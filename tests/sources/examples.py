"""Files with every trap a record's border can have, and what a simple reader says is in them."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from penstock.sources import PartRun, Recipe, SourceOptions, make_recipe

Record = dict[str, Any]

_WORDS = st.text(st.sampled_from('ab,"é \t{}\\'), max_size=8)
_LINES = st.one_of(_WORDS, st.just(""), st.just("long " * 40))
_NEWLINES = st.sampled_from(["\n", "\r\n"])
KINDS = ["text", "jsonl", "csv", "quoted csv", "tsv", "gzip jsonl", "gzip csv", "parquet"]


def recipe_of(paths: Any, *, block_bytes: int = 1 << 20, **settings: Any) -> Recipe:
    """A recipe with all that is not given left at its default."""
    reading = SourceOptions(batch_bytes=block_bytes, **settings.pop("reading", {}))
    defaults: dict[str, Any] = {"format": None, "columns": None, "text_unit": None, "shuffle_buffer": 0, "seed": 0}
    return make_recipe(paths, reading=reading, **{**defaults, "on_error": "raise", **settings})


def read_all(recipe: Recipe, num_parts: int = 1, epoch: int = 0) -> list[Record]:
    """Records of all parts, one part after the other."""
    parts = (PartRun(recipe, part=part, num_parts=num_parts, epoch=epoch) for part in range(num_parts))
    return [record for run in parts for record in run]


def as_counted(records: list[Record]) -> list[str]:
    """Records in an order of their own, to compare what came without its order."""
    return sorted(json.dumps(record, sort_keys=True) for record in records)


@st.composite
def folders(draw: st.DrawFn, kinds: list[str] = KINDS) -> tuple[str, list[tuple[str, bytes, list[Record]]], dict]:
    """A kind, its files as (name, content, records), and options to read them."""
    kind = draw(st.sampled_from(kinds))
    files = []
    for number in range(draw(st.integers(1, 3))):
        content, records = draw(_FILES[kind]())
        files.append((f"{number}.{_NAMES[kind]}", content, records))
    return kind, files, {"quote": None} if kind == "tsv" else {}


def write(folder: Path, files: list[tuple[str, bytes, list[Record]]]) -> tuple[list[str], list[Record]]:
    """Write files; their paths, and their records in order."""
    for name, content, _ in files:
        (folder / name).write_bytes(content)
    return [str(folder / name) for name, _, _ in files], [record for _, _, records in files for record in records]


@st.composite
def _text(draw: st.DrawFn) -> tuple[bytes, list[Record]]:
    lines = draw(st.lists(_LINES, max_size=12))
    newline = draw(_NEWLINES)
    has_end = draw(st.booleans()) or (bool(lines) and not lines[-1])
    text = newline.join(lines) + (newline if has_end and lines else "")
    return text.encode(), [{"text": line} for line in lines]


@st.composite
def _jsonl(draw: st.DrawFn) -> tuple[bytes, list[Record]]:
    records = draw(st.lists(st.dictionaries(_WORDS, st.one_of(_LINES, st.integers(), st.none())), max_size=12))
    newline, is_ascii = draw(_NEWLINES), draw(st.booleans())
    lines = [json.dumps(record, ensure_ascii=is_ascii) for record in records]
    for place in sorted(draw(st.lists(st.integers(0, len(lines)), max_size=3)), reverse=True):
        lines.insert(place, draw(st.sampled_from(["", " "])))
    text = newline.join(lines) + (newline if draw(st.booleans()) else "")
    return text.encode(), records


def _csv(delimiter: str, quoting: Any, fields: st.SearchStrategy[str]) -> st.SearchStrategy[tuple[bytes, list[Record]]]:
    @st.composite
    def build(draw: st.DrawFn) -> tuple[bytes, list[Record]]:
        rows = draw(st.lists(st.tuples(fields, fields), max_size=12))
        text = io.StringIO()
        writer = csv.writer(text, delimiter=delimiter, quoting=quoting, lineterminator=draw(_NEWLINES), quotechar='"')
        writer.writerows([("x", "y"), *rows])
        content = text.getvalue()
        content = content if draw(st.booleans()) else content.rstrip("\r\n")
        return content.encode(), [{"x": x, "y": y} for x, y in rows]

    return build()


@st.composite
def _parquet(draw: st.DrawFn) -> tuple[bytes, list[Record]]:
    values = draw(st.lists(st.tuples(st.integers(-9, 9), _LINES), max_size=12))
    records = [{"n": n, "text": text} for n, text in values]
    file = io.BytesIO()
    table = pa.Table.from_pylist(records, pa.schema([("n", pa.int64()), ("text", pa.string())]))
    pq.write_table(table, file, row_group_size=draw(st.integers(1, 5)))
    return file.getvalue(), records


@st.composite
def _gzipped(draw: st.DrawFn, files: st.SearchStrategy[tuple[bytes, list[Record]]]) -> tuple[bytes, list[Record]]:
    content, records = draw(files)
    return gzip.compress(content, 1), records


_ANY_FIELD = st.text(st.sampled_from('ab,"\n\r\té '), max_size=9)
_USUAL_FIELD = st.one_of(st.text(st.sampled_from('ab,"\n é'), min_size=1, max_size=9), st.just("w " * 60))
_PLAIN_FIELD = st.text(st.sampled_from("ab, é"), min_size=1, max_size=9)
_FILES: dict[str, Any] = {
    "text": _text,
    "jsonl": _jsonl,
    "csv": lambda: _csv(",", csv.QUOTE_MINIMAL, _USUAL_FIELD),
    "quoted csv": lambda: _csv(",", csv.QUOTE_ALL, _ANY_FIELD),
    "tsv": lambda: _csv("\t", csv.QUOTE_NONE, _PLAIN_FIELD),
    "gzip jsonl": lambda: _gzipped(_jsonl()),
    "gzip csv": lambda: _gzipped(_csv(",", csv.QUOTE_ALL, _ANY_FIELD)),
    "parquet": _parquet,
}
_NAMES = {
    "text": "txt",
    "jsonl": "jsonl",
    "csv": "csv",
    "quoted csv": "csv",
    "tsv": "tsv",
    "gzip jsonl": "jsonl.gz",
    "gzip csv": "csv.gz",
    "parquet": "parquet",
}


def every_state(run: PartRun) -> Iterator[tuple[dict[str, Any], list[Record]]]:
    """At each record of a run, and before and behind them: the state, and all that was handed out so far."""
    handed_out: list[Record] = []
    yield run.state(), []
    for record in run:
        handed_out.append(record)
        yield run.state(), list(handed_out)
    yield run.state(), list(handed_out)

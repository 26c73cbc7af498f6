"""Data that is already in this process: iterables of dicts, Arrow tables, Hugging Face datasets.

A split is plain data and cannot hold an object, so it holds a name under which the object is kept here. Such a
split is read in the process that listed it (`Split.needs_this_process`). A Hugging Face dataset that is just
its Arrow files is listed as those files instead, which any worker can read.
"""

import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import FormatError
from penstock.sources._arrow import (
    array_or_list,
    arrow,
    explain_damage,
    fields_within,
    records_of_batch,
    value_at,
    with_nan,
)
from penstock.sources._columnar import cut_batch
from penstock.sources._model import Records, RowError, SourceFile, Split, byte_ranges
from penstock.sources._options import SourceOptions

_objects: dict[str, Any] = {}
_PLAIN = (str, int, float, bool, dict, list, type(None))
_MOST_ROWS = 16_384
_DATA_FRAMES = ("pandas", "polars")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IterableSource:
    """Any Python iterable of dicts, read in order, in this process.

    >>> import penstock, tempfile
    >>> source = IterableSource(records=lambda: ({"n": n} for n in range(3)), name="numbers", identity="v1")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     penstock.prepare(source, folder).num_samples
    3
    """

    records: Iterable[Mapping[str, Any]] | Callable[[], Iterable[Mapping[str, Any]]]
    """The dicts, or a function that returns a fresh iterable of them. An iterator is read once."""
    name: str = "iterable"
    """Name of the source in the records' origins; two sources of one run need two names."""
    identity: str = ""
    """Changes when the data does, like that of files. "" means unknown: nothing made from it is reused."""


class _Once:
    """An iterator that can be peeked at before it is read: what a peek consumes is kept for the reader."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items
        self._ahead: list[Any] = []
        self._is_read = False

    def peek(self) -> Iterator[Any]:
        """The items from the first on."""
        for place in itertools.count():
            if place == len(self._ahead):
                try:
                    self._ahead.append(next(self._items))
                except StopIteration:
                    return
            yield self._ahead[place]

    def read(self) -> Iterator[Any]:
        """The items from the first on, which are then used up."""
        if self._is_read:
            raise FormatError(
                "This iterator was already read, and cannot be read again. "
                "Give penstock.IterableSource(records=function), where the function returns a new one."
            )
        self._is_read = True
        ahead, self._ahead = self._ahead, []
        return itertools.chain(ahead, self._items)


def files_of_object(source: Any) -> list[str]:
    """Arrow files that hold exactly what the object does; none if it is not a dataset of just its files.

    Raises:
        ValueError: the object is several datasets, or changes its rows when they are accessed.
    """
    if type(source).__name__ in ("DatasetDict", "IterableDatasetDict"):
        raise ValueError(f"The dataset has the parts {', '.join(map(repr, source))}; give one of them.")
    if not _is_hf_dataset(source):
        return []
    if source.format["type"] == "custom":  # what is stored are the rows before the transform
        raise ValueError(
            "The dataset has a transform (set_transform, with_transform), which is not applied here. Give "
            "dataset.with_format(None), with the function as a map of the plan or as transform=."
        )
    return _files_of_dataset(source)


def list_object(source: Any, number: int) -> SourceFile:
    """The object as one file, under the name by which it is kept."""
    name = source.name if isinstance(source, IterableSource) else type(source).__name__.lower()
    path = f"object:{number}:{name}"
    if type(source).__module__.partition(".")[0] in _DATA_FRAMES:
        source = arrow().table(source)
    _objects[path] = _once(source)
    identity = source.identity if isinstance(source, IterableSource) else str(getattr(source, "_fingerprint", ""))
    return SourceFile(path, _num_bytes(source), identity)


def split_object(file: SourceFile, target_bytes: int) -> list[Split]:
    """Ranges of rows if rows can be accessed by number; otherwise one split."""
    source = _object(file.path)
    if file.num_bytes < 0:
        return [Split("object", file.path, 0, -1, 0)]
    num_rows = len(source)
    rows_per_split = max(1, num_rows * target_bytes // max(1, file.num_bytes))
    ranges = byte_ranges(num_rows, rows_per_split)
    return [Split("object", file.path, begin, end, file.num_bytes * (end - begin) // num_rows) for begin, end in ranges]


def read_object(split: Split, options: SourceOptions) -> Iterator[Records]:
    """Records of an object that was listed in this process."""
    source = _object(split.path)
    if split.end >= 0:
        return _read_rows(source, split, options)
    items = source.read() if isinstance(source, _Once) else _iterate(source)
    return _read_items(items, split.path, options)


def peek_object(split: Split, options: SourceOptions) -> Iterator[Records]:
    """Like `read_object`, but an iterator can still be read afterwards."""
    source = _object(split.path)
    if isinstance(source, _Once):
        return _read_items(source.peek(), split.path, options)
    return read_object(split, options)


def is_table(source: Any) -> bool:
    """Whether an object is an Arrow table or a Hugging Face dataset."""
    return hasattr(source, "__arrow_c_stream__") or type(source).__module__.partition(".")[0] == "datasets"


def _object(path: str) -> Any:
    if path not in _objects:
        raise ValueError(f"{path} is an object in the process that listed it; this process cannot read it.")
    return _objects[path]


def _is_hf_dataset(source: Any) -> bool:
    datasets = sys.modules.get("datasets")
    return datasets is not None and isinstance(source, datasets.Dataset)


def _files_of_dataset(dataset: Any) -> list[str]:
    """Arrow files that hold exactly the dataset; none if rows or columns were changed, or a file occurs twice."""
    paths = [entry["filename"] for entry in dataset.cache_files]
    if dataset._indices is not None or len(set(paths)) != len(paths) or not _is_as_in_files(dataset.data):
        return []
    ipc, num_rows = arrow("ipc"), 0
    for path in paths:
        with explain_damage(path, "Arrow"), arrow().memory_map(path) as source:
            reader = ipc.open_stream(source)
            if reader.schema.names != dataset.column_names:
                return []
            num_rows += sum(batch.num_rows for batch in reader)
    return paths if num_rows == len(dataset) else []  # a dataset in memory has no files


def _is_as_in_files(table: Any) -> bool:
    """Whether a dataset's table is made of mapped files with nothing beside them, and nothing done to their columns.

    Names and counts do not show it: a column may have been replaced by another of the same name.
    """
    blocks = getattr(table, "blocks", [[table]])
    return all(len(row) == 1 and _is_whole_file(row[0]) for row in blocks)


def _is_whole_file(block: Any) -> bool:
    changes = getattr(block, "replays", None)  # a table in memory keeps no list of them
    return changes is not None and all(name == "replace_schema_metadata" for name, *_ in changes)


def _num_bytes(source: Any) -> int:
    """Size of an object whose rows can be accessed by number; -1 if they only come in order."""
    if _is_hf_dataset(source):
        return int(source.data.nbytes)
    return int(source.nbytes) if hasattr(source, "nbytes") and hasattr(source, "slice") else -1


def _read_rows(source: Any, split: Split, options: SourceOptions) -> Iterator[Records]:
    row, step = 0, max(1, (split.end - split.begin) * options.batch_bytes // max(1, split.num_bytes))
    for begin in range(split.begin, split.end, step):
        end = min(begin + step, split.end)
        table = source.with_format("arrow")[begin:end] if _is_hf_dataset(source) else source.slice(begin, end - begin)
        chosen = table if options.columns is None else table.select(list(options.columns))
        for piece in cut_batch(chosen, options.batch_bytes):
            yield with_nan(records_of_batch(piece, row, split.path), options)
            row += piece.num_rows


def _once(source: Any) -> Any:
    """The source, wrapped if it can be read only once."""
    records: Any = source.records if isinstance(source, IterableSource) else source
    if hasattr(records, "read_next_batch"):
        return _Once(row for batch in records for row in batch.to_pylist())
    return _Once(records) if isinstance(records, Iterator) else source


def _iterate(source: Any) -> Iterator[Any]:
    records: Any = source.records if isinstance(source, IterableSource) else source
    return iter(records() if callable(records) else records)


def _read_items(items: Iterator[Any], path: str, options: SourceOptions) -> Iterator[Records]:
    first_row = num_bytes = 0
    batch: list[Any] = []
    for item in items:
        batch.append(item)
        num_bytes += _size(item)
        if num_bytes >= options.batch_bytes or len(batch) == _MOST_ROWS:
            yield _records_of_items(batch, first_row, num_bytes, path, options)
            first_row += len(batch)
            batch, num_bytes = [], 0
    if batch:
        yield _records_of_items(batch, first_row, num_bytes, path, options)


def _size(item: Any) -> int:
    values = item.values() if isinstance(item, Mapping) else ()
    return sum(getattr(value, "nbytes", 0) or (len(value) if hasattr(value, "__len__") else 8) for value in values)


def _records_of_items(items: list[Any], row: int, num_bytes: int, path: str, options: SourceOptions) -> Records:
    errors = [error for place, item in enumerate(items) if (error := _find_fault(item, path, row + place))]
    bad = {error.row - row for error in errors}
    good = [item for place, item in enumerate(items) if place not in bad]
    names = options.columns or tuple(dict.fromkeys(name for item in good for name in item))
    columns = {name: _column(good, name, name in options.exact) for name in names}
    is_absent = any(str(getattr(column, "type", "")) == "null" for column in columns.values())
    known = tuple(dict.fromkeys(name for item in good for name in fields_within(item))) if is_absent else ()
    return Records(columns, row, len(good), tuple(errors), num_bytes, known)


def _column(items: list[Mapping[str, Any]], name: str, is_exact: bool) -> Any:
    values = [value_at(item, name) for item in items]
    if is_exact and any(value is not None for value in values) and (copies := _copies(values)) is not None:
        return copies
    if all(isinstance(value, _PLAIN) for value in values):
        return array_or_list(values)
    return values


def _copies(values: list[Any]) -> list[Any] | None:
    """The values if they are what JSON can hold, with lists in place of tuples; None if they are not."""
    try:
        copies: list[Any] = json.loads(json.dumps(values))
    except (TypeError, ValueError, RecursionError):
        return None
    return copies


def _find_fault(item: Any, path: str, row: int) -> RowError | None:
    if not isinstance(item, Mapping):
        return RowError(path, row, "not_an_object", f"item {row} is a {type(item).__name__}, not a dict.")
    for name, value in item.items():
        if isinstance(value, str) and not value.isascii() and not _is_encodable(value):
            message = f"item {row} contains a lone surrogate in {name!r}, which is not a character."
            return RowError(path, row, "invalid_utf8", message)
    return None


def _is_encodable(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True

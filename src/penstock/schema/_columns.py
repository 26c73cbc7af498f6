"""Columns and schemas, and the one-line language they are written in.

"int64"               one number per sample
"uint8[224,224,3]"    an array of a fixed shape
"uint16[*]"           an array whose first dimension differs from sample to sample
"float32[*,16]"       the same, followed by fixed dimensions
"bytes"               a byte string: an encoded image, a text
"bytes[*]"            any number of byte strings: the images of a document

A stored schema may have one more column, `__xxh64__`: a hash of each sample, which Penstock writes and never shows.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from penstock.errors import SchemaError, did_you_mean
from penstock.schema._dtypes import dtype_from_name, dtype_name

Kind = Literal["fixed", "ragged", "bytes", "byte_strings"]

MAX_COLUMNS = 1024
MAX_DIMENSIONS = 32
# numpy refuses an array whose sizes multiply past 2**63 even when one of them is 0.
MAX_ITEM_BYTES = 1 << 40
_SPEC = re.compile(r"(?P<dtype>[a-z0-9_]+)(\[(?P<shape>[0-9*, ]*)\])?", re.ASCII)
HASH_COLUMN = "__xxh64__"
LABEL_COLUMNS = ("label", "labels", "class", "target", "category", "domain", "source", "subset", "language", "lang")
"""Names that people give to columns of classes or sources."""
_HASH_SPEC = "uint64"
# A dot would collide with `x.values` and `x.offsets`, two underscores with `__crc32c__`; a lone surrogate has no
# UTF-8, so safetensors would not open the file. `__key__` is what WebDataset calls the name of a sample.
_NAME = re.compile(r"(?!__(?!key__$))[^\x00-\x1f\x7f.\ud800-\udfff]{1,200}")


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a dataset: its name, dtype and shape.

    >>> Column.parse("tokens", "uint16[*]")
    Column(name='tokens', dtype=dtype('uint16'), shape=(), kind='ragged')
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    """Shape of one sample, or of one element of a ragged sample."""
    kind: Kind = "fixed"

    @classmethod
    def parse(cls, name: str, spec: str) -> Column:
        """Column called `name` from its one-line description."""
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise SchemaError(
                f"{reprlib.repr(name)} cannot name a column: "
                "1 to 200 printable characters, no dot, not starting with '__' (but '__key__' is fine)."
            )
        if spec in ("bytes", "bytes[*]"):
            return cls(name, np.dtype("u1"), (), "bytes" if spec == "bytes" else "byte_strings")
        match = _SPEC.fullmatch(spec) if isinstance(spec, str) else None
        if match is None:
            raise SchemaError(
                f"Column {name!r} has the type {reprlib.repr(spec)}. "
                "Write 'int64', 'uint8[224,224,3]', 'uint16[*]', 'bytes' or 'bytes[*]'."
            )
        kind, shape = _parse_shape(name, spec, match["shape"])
        dtype = dtype_from_name(match["dtype"])
        _check_item(name, dtype, shape)
        return cls(name, dtype, shape, kind)

    @property
    def spec(self) -> str:
        """The one-line description that `parse` reads."""
        if self.kind in ("bytes", "byte_strings"):
            return "bytes" if self.kind == "bytes" else "bytes[*]"
        dimensions = [*(["*"] if self.is_ragged else []), *map(str, self.shape)]
        return dtype_name(self.dtype) + (f"[{','.join(dimensions)}]" if dimensions else "")

    @property
    def is_ragged(self) -> bool:
        """Whether samples differ in length; byte strings do."""
        return self.kind != "fixed"

    @property
    def is_per_token(self) -> bool:
        """Whether a sample can have a number for each of its tokens, as a loss mask has."""
        return self.kind == "ragged" and not self.shape

    @property
    def stored(self) -> tuple[Column, ...]:
        """The columns that a shard holds for it: the strings of a `bytes[*]` lie side by side, with their sizes beside.

        No other column's tensors have the names of the sizes', because no name has a dot.
        """
        if self.kind != "byte_strings":
            return (self,)
        sizes = Column(f"{self.name}.sizes", np.dtype("<i8"), (), "ragged")
        return (Column(self.name, self.dtype, (), "bytes"), sizes)

    @property
    def num_items(self) -> int:
        """Numbers in one sample, or in one element of a ragged sample."""
        return math.prod(self.shape)

    @property
    def item_bytes(self) -> int:
        """Bytes of one sample, or of one element of a ragged sample."""
        return self.num_items * self.dtype.itemsize


def _parse_shape(name: str, spec: str, text: str | None) -> tuple[Kind, tuple[int, ...]]:
    if text is None:
        return "fixed", ()
    first, *rest = [part.strip() for part in text.split(",")]
    sizes = rest if first == "*" else [first, *rest]
    if not all(size.isdigit() and len(size) < 10 for size in sizes):
        raise SchemaError(
            f"Column {name!r}: {reprlib.repr(spec)} is not a shape: use numbers, with at most one '*' in front."
        )
    return ("ragged" if first == "*" else "fixed"), tuple(int(size) for size in sizes)


def _check_item(name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    num_bytes = dtype.itemsize * math.prod(max(1, size) for size in shape)
    if len(shape) > MAX_DIMENSIONS or num_bytes > MAX_ITEM_BYTES:
        raise SchemaError(
            f"Column {name!r} has {len(shape)} dimensions of {num_bytes:,} bytes; "
            f"the limits are {MAX_DIMENSIONS} and {MAX_ITEM_BYTES:,}."
        )


@dataclass(frozen=True, slots=True)
class Schema(Mapping[str, Column]):
    """The columns of a dataset, in order.

    >>> schema = Schema.parse({"tokens": "uint16[*]", "label": "int64"})
    >>> schema["label"].dtype
    dtype('int64')
    >>> schema.to_json()
    {'tokens': 'uint16[*]', 'label': 'int64'}
    """

    columns: tuple[Column, ...]

    @classmethod
    def parse(cls, columns: Mapping[str, str]) -> Schema:
        """Schema from `{name: one-line description}`."""
        if not columns:
            raise SchemaError("A dataset needs at least one column.")
        if len(columns) > MAX_COLUMNS:
            raise SchemaError(f"{len(columns):,} columns requested; a dataset can have at most {MAX_COLUMNS:,}.")
        return cls(tuple(Column.parse(name, spec) for name, spec in columns.items()))

    @classmethod
    def parse_stored(cls, columns: Mapping[str, str]) -> Schema:
        """Schema from a manifest, which may end with a column of sample hashes."""
        shown = dict(columns)
        is_hashed = shown.pop(HASH_COLUMN, None) == _HASH_SPEC and list(columns)[-1] == HASH_COLUMN
        return cls.parse(shown).with_hashes() if is_hashed else cls.parse(columns)

    def with_hashes(self) -> Schema:
        """The same columns, plus a hash of each sample."""
        return Schema((*self.columns, Column(HASH_COLUMN, np.dtype("<u8"), ())))

    @property
    def stored(self) -> Schema:
        """The columns that a shard holds."""
        if all(column.kind != "byte_strings" for column in self.columns):
            return self
        return Schema(tuple(part for column in self.columns for part in column.stored))

    @property
    def shown(self) -> Schema:
        """The columns that people see."""
        return Schema(tuple(column for column in self.columns if column.name != HASH_COLUMN))

    def to_json(self) -> dict[str, str]:
        """The form that `parse_stored` reads; without hashes, `parse` reads it too."""
        return {column.name: column.spec for column in self.columns}

    def select(self, names: Iterable[str]) -> Schema:
        """Schema of these columns, in this order; a single one may come without a list."""
        chosen = tuple(self[name] for name in ((names,) if isinstance(names, str) else names))
        if not chosen or len(set(chosen)) != len(chosen):
            raise SchemaError(f"Choose at least one column, each once; the columns are {', '.join(map(repr, self))}.")
        return Schema(chosen)

    def __getitem__(self, name: str) -> Column:
        for column in self.columns:
            if column.name == name:
                return column
        raise SchemaError(
            f"No column {name!r}; the columns are {', '.join(map(repr, self))}.{did_you_mean(name, self)}"
        )

    def get(self, name: str, default: Any = None) -> Any:
        """The column called `name`, or `default`."""
        return next((column for column in self.columns if column.name == name), default)

    def __contains__(self, name: object) -> bool:
        return any(column.name == name for column in self.columns)

    def __iter__(self) -> Iterator[str]:
        return (column.name for column in self.columns)

    def __len__(self) -> int:
        return len(self.columns)

    def __str__(self) -> str:
        return ", ".join(f"{column.name}: {column.spec}" for column in self.columns)

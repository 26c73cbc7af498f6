"""A hash of each sample's content, which identifies it wherever it is stored.

    content of a sample    its `tokens`, else its `image`, else its `audio`, else its `text`, else all of its columns
    its hash               XXH64 of the content's bytes; of several columns, XXH64 of their hashes side by side

So a sample keeps its hash when data around it is added, removed, reordered, shuffled or cut into other shards, and when
a label is renumbered or a score recomputed. Equal contents have equal hashes. `prepare` stores them, 8 bytes per
sample, in the column `__xxh64__`; for any other data the same hashes are computed when needed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.schema import Ragged, Schema
from penstock.shards._provenance import ORIGIN_COLUMN, ORIGIN_SPEC

Hashes = NDArray[np.uint64]
_CONTENT = ("tokens", "image", "audio", "text")


@functools.cache
def _kernels() -> ModuleType:
    from penstock.shards import _hash_kernels

    return _hash_kernels


def content_columns(schema: Schema) -> tuple[str, ...]:
    """The columns that make up a sample's content, which does not include where it came from."""
    for name in _CONTENT:
        if name in schema:
            return (name,)
    columns = schema.shown.columns
    content = tuple(column.name for column in columns if (column.name, column.spec) != (ORIGIN_COLUMN, ORIGIN_SPEC))
    return content or tuple(schema.shown)


def hash_samples(columns: Sequence[Ragged | NDArray[Any]]) -> Hashes:
    """One hash per sample over all of these columns."""
    hashes = [_hash_column(column) for column in columns]
    return hashes[0] if len(hashes) == 1 else _hash_column(np.stack(hashes, axis=1))


def hash_texts(texts: Iterable[str]) -> Hashes:
    """A hash of each text, such as the path of a file."""
    encoded = [text.encode(errors="surrogatepass") for text in texts]
    joined = np.frombuffer(b"".join(encoded), np.uint8)
    return _hash_column(Ragged.from_lengths(joined, [len(text) for text in encoded], True))


def hash_content(schema: Schema, batch: Mapping[str, Ragged | NDArray[Any]]) -> Hashes:
    """The hash of each sample of a converted batch."""
    return hash_samples([batch[name] for name in content_columns(schema)])


def _hash_column(column: Ragged | NDArray[Any]) -> Hashes:
    values, edges = (
        (column.values, column.offsets) if isinstance(column, Ragged) else (column, np.arange(len(column) + 1))
    )
    item_bytes = values.itemsize * int(np.prod(values.shape[1:], dtype=np.int64))
    data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    hashes = np.empty(len(edges) - 1, np.uint64)
    _kernels().hash_spans(data, np.ascontiguousarray(edges, np.int64) * item_bytes, hashes)
    return hashes

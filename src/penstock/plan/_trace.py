"""Where the rows of a batch came from: the question behind every loss spike."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.plan._dataset import Dataset
from penstock.plan._mixture import MixedRows
from penstock.plan._packed import PackedRows
from penstock.plan._rows import RowSource
from penstock.plan._sample_rows import SampleRows
from penstock.plan._window_rows import WindowRows
from penstock.schema import offsets_of

_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentTrace:
    """One document, or a part of it, in a batch."""

    row: int
    """Row of the batch."""
    column: int
    """Place in the row where it begins."""
    source: str
    """Name of the mixture's source, as in "web" or, in a mixture of mixtures, "web/news"; or ""."""
    document: int
    """Index of the document in its dataset."""
    start: int
    """First token of the document that is here."""
    size: int
    """Tokens of the document that are here."""
    origin: str
    """File and row that the document was prepared from, or "" when the dataset does not say."""


def trace_rows(source: RowSource, rows: NDArray[np.int64], *, name: str = "") -> list[DocumentTrace]:
    """The documents behind absolute rows, row by row."""
    if isinstance(source, MixedRows):
        return _trace_mixture(source, rows, name)
    if isinstance(source, PackedRows):
        pieces = source.place(rows)
        fields = (pieces.rows, pieces.columns, pieces.documents, pieces.starts, pieces.sizes)
        return [_trace(source.dataset, name, *map(int, values)) for values in zip(*fields, strict=True)]
    if isinstance(source, WindowRows):
        return _trace_windows(source, rows, name)
    assert isinstance(source, SampleRows)
    samples = source.sample_indices(rows).tolist()
    return [_trace(source.dataset, name, row, 0, sample, 0, 1) for row, sample in enumerate(samples)]


def describe_row(source: RowSource, row: int) -> str:
    """A row of the run in words: where rows are samples, which one, and what it was prepared from."""
    if isinstance(source, MixedRows):
        (number,), (own,) = (found.tolist() for found in source.mixture.locate(np.array([row])))
        return f"row {row:,}, which is {describe_row(source.sources[number], own)} of {source.names[number]!r}"
    if not isinstance(source, SampleRows):
        return f"row {row:,}"
    (sample,) = source.sample_indices(np.array([row])).tolist()
    origin = source.dataset.origin(sample)
    return f"row {row:,} (sample {sample:,}{f', from {origin}' if origin else ''})"


def _trace_mixture(source: MixedRows, rows: NDArray[np.int64], name: str) -> list[DocumentTrace]:
    found: list[DocumentTrace] = []
    prefix = f"{name}/" if name else ""
    turns, own = source.mixture.locate(rows)
    for row, (number, position) in enumerate(zip(turns.tolist(), own.tolist(), strict=True)):
        traces = trace_rows(source.sources[number], np.array([position]), name=prefix + source.names[number])
        found += [dataclasses.replace(trace, row=row) for trace in traces]
    return found


def _trace_windows(source: WindowRows, rows: NDArray[np.int64], name: str) -> list[DocumentTrace]:
    length = source.stage.length
    firsts = (source.epochs.find(rows) * length).tolist()
    if not source.column.is_ragged:
        return [_trace(source.dataset, name, row, 0, first, 0, length) for row, first in enumerate(firsts)]
    found: list[list[DocumentTrace]] = [[] for _ in firsts]
    for first_document, starts in _stretches(source, end=max(firsts, default=0) + length):
        for row, first in enumerate(firsts):
            begin = max(0, int(np.searchsorted(starts, first, side="right")) - 1)
            end = min(len(starts) - 1, int(np.searchsorted(starts, first + length, side="left")))
            for place in range(begin, end):
                low, high = max(first, int(starts[place])), min(first + length, int(starts[place + 1]))
                if high > low:
                    document, start = first_document + place, low - int(starts[place])
                    found[row].append(_trace(source.dataset, name, row, low - first, document, start, high - low))
    return [trace for traces in found for trace in traces]


def _stretches(source: WindowRows, end: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """(first document, token at which each begins and the last one ends) of stretches of documents, up to a token.

    Nothing says which document a token is in but the lengths of all before it: about 100 M of them are read per second.
    """
    num_documents, tokens = len(source.dataset), 0
    for begin in range(0, num_documents, _CHUNK):
        lengths = source.dataset.stored.lengths_between(source.column, begin, min(begin + _CHUNK, num_documents))
        starts = tokens + offsets_of(lengths)
        yield begin, starts
        tokens = int(starts[-1])
        if tokens >= end:
            return


def _trace(dataset: Dataset, source: str, row: int, column: int, document: int, start: int, size: int) -> DocumentTrace:
    origin = dataset.origin(document)
    return DocumentTrace(
        row=row, column=column, source=source, document=document, start=start, size=size, origin=origin or ""
    )

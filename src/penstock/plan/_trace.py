"""Where the rows of a batch came from: the question behind every loss spike."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.plan._dataset import Dataset
from penstock.plan._mixture import MixedRows
from penstock.plan._packed import PackedRows
from penstock.plan._rows import RowSource, SampleRows, WindowRows


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
    column, length = source.dataset.schema[source.stage.column], source.stage.length
    if not column.is_ragged:
        firsts = source.epochs.find(rows) * length
        return [_trace(source.dataset, name, row, 0, first, 0, length) for row, first in enumerate(firsts.tolist())]
    starts = np.concatenate([[0], np.cumsum(source.dataset.lengths(column.name))])
    found = []
    for row, first in enumerate((source.epochs.find(rows) * length).tolist()):
        begin = int(np.searchsorted(starts, first, side="right")) - 1
        end = int(np.searchsorted(starts, first + length, side="left"))
        for document in range(begin, end):
            low, high = max(first, int(starts[document])), min(first + length, int(starts[document + 1]))
            if high > low:
                start = low - int(starts[document])
                found.append(_trace(source.dataset, name, row, low - first, document, start, high - low))
    return found


def _trace(dataset: Dataset, source: str, row: int, column: int, document: int, start: int, size: int) -> DocumentTrace:
    origin = dataset.origin(document)
    return DocumentTrace(
        row=row, column=column, source=source, document=document, start=start, size=size, origin=origin or ""
    )

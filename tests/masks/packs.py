"""Packed batches to test with, made from nothing but lengths."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import torch
from hypothesis import strategies as st
from torch import Tensor

PackedBatch = dict[str, Tensor | int]
Span = tuple[int, int, int]  # row, first position, one past the last


def pack(lengths: Sequence[Sequence[int]], row_length: int, *, seed: int = 0) -> PackedBatch:
    """The batch whose row r holds documents of `lengths[r]` tokens, then padding."""
    document_ids = torch.full((len(lengths), row_length), -1, dtype=torch.int32)
    position_ids = torch.zeros(document_ids.shape, dtype=torch.int64)
    for document, (row, start, end) in enumerate(documents(lengths)):
        document_ids[row, start:end] = document
    starts = [0]
    for row, start, end in segments(lengths, row_length):
        position_ids[row, start:end] = torch.arange(end - start)
        starts.append(row * row_length + end)
    tokens = torch.randint(1, 50, document_ids.shape, generator=torch.Generator().manual_seed(seed))
    tokens[document_ids == -1] = 0
    labels = tokens.masked_fill((position_ids == 0) | (document_ids == -1), -100)
    return {
        "input_ids": tokens,
        "labels": labels,
        "position_ids": position_ids,
        "document_ids": document_ids,
        "cu_seqlens": torch.tensor(starts, dtype=torch.int32),
        "max_seqlen": max(end - start for start, end in pairwise(starts)),
        "num_documents": sum(map(len, lengths)),
        "num_targets": int((labels != -100).sum()),
    }


def documents(lengths: Sequence[Sequence[int]]) -> list[Span]:
    """Where each document of `pack(lengths, ...)` lies."""
    spans = []
    for row, row_lengths in enumerate(lengths):
        start = 0
        for length in row_lengths:
            spans.append((row, start, start + length))
            start += length
    return spans


def segments(lengths: Sequence[Sequence[int]], row_length: int) -> list[Span]:
    """Where each document and each row's padding tail lies."""
    with_tails = [[*row, row_length - sum(row)] if sum(row) < row_length else row for row in lengths]
    return documents(with_tails)


@st.composite
def packs(draw: st.DrawFn, *, max_row_length: int = 96, max_rows: int = 3) -> tuple[list[list[int]], int]:
    """Lengths and a row length: rows full or padded, documents from one token to the whole row."""
    row_length = draw(st.integers(1, max_row_length))
    longest = draw(st.integers(1, row_length))
    rows = []
    for _ in range(draw(st.integers(1, max_rows))):
        room = draw(st.integers(0, row_length)) if draw(st.booleans()) else row_length
        rows.append(_cut(room, longest, random.Random(draw(st.integers(0, 2**16)))))
    return rows, row_length


def _cut(room: int, longest: int, rng: random.Random) -> list[int]:
    lengths = []
    while room:
        lengths.append(rng.randint(1, min(longest, room)))
        room -= lengths[-1]
    return lengths

"""Lengths to pack, and slow, obvious answers to compare with."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
from hypothesis import settings
from hypothesis import strategies as st

from penstock.packing import Packing, PackingSettings

Lengths = npt.NDArray[np.int64]

# The first example compiles kernels, so no deadline; warnings stay errors.
law = settings(deadline=None, max_examples=120)

keys = st.integers(0, 2**64 - 1)
policies: st.SearchStrategy[Literal["split", "truncate", "drop"]] = st.sampled_from(["split", "truncate", "drop"])


@st.composite
def packing_settings(draw: st.DrawFn, *, limited: bool | None = None) -> PackingSettings:
    """Settings with short rows, and rows about one and several words of the bitmap long."""
    length = draw(st.one_of(st.integers(1, 12), st.sampled_from([63, 64, 65, 127, 128, 4095, 4096, 4097, 9000])))
    max_documents = draw(st.integers(1, 6)) if limited else None
    if limited is None:
        max_documents = draw(st.one_of(st.none(), st.integers(1, 6)))
    return PackingSettings(length=length, long=draw(policies), max_documents=max_documents)


@st.composite
def documents_for(draw: st.DrawFn, settings: PackingSettings) -> Lengths:
    """Lengths around the row's, with many ties, some empty documents and some of several rows."""
    length = settings.length
    near = st.sampled_from([0, 1, length // 3, length // 2, length // 2 + 1, length - 1, length, length + 1])
    values = draw(st.lists(st.one_of(near, st.integers(0, length), st.integers(0, 3 * length)), max_size=60))
    return np.array(values, dtype=np.int64)


@st.composite
def cases(draw: st.DrawFn, *, limited: bool | None = None) -> tuple[Lengths, PackingSettings]:
    """Settings, and lengths that are awkward for them."""
    settings = draw(packing_settings(limited=limited))
    return draw(documents_for(settings)), settings


@st.composite
def vector_cases(draw: st.DrawFn) -> tuple[Lengths, PackingSettings]:
    """Settings with one to three further budgets, and what documents take of them; some exceed one."""
    limits = tuple(draw(st.lists(st.sampled_from([1, 2, 5, 16, 1000, 2**30]), min_size=1, max_size=3)))
    length = draw(st.sampled_from([1, 7, 64, 65, 4096]))
    max_documents = draw(st.one_of(st.none(), st.integers(1, 6)))
    settings = PackingSettings(length=length, long="drop", max_documents=max_documents, limits=limits)
    amounts = [st.one_of(st.integers(0, 3), st.integers(0, size), st.just(size + 1)) for size in (length, *limits)]
    return np.array(draw(st.lists(st.tuples(*amounts), max_size=50)), np.int64).reshape(-1, 1 + len(limits)), settings


def draw_documents_with_pictures(num_documents: int, *, tokens_per_picture: int, seed: int) -> Lengths:
    """Tokens and pictures of each: text as on the web, a third without pictures, others with up to 12."""
    rng = np.random.default_rng(seed)
    text = np.clip(rng.lognormal(5.5, 1.0, num_documents), 10, 3000).astype(np.int64)
    pictures = np.where(rng.random(num_documents) < 0.3, 0, np.minimum(rng.geometric(0.45, num_documents), 12))
    sizes = rng.integers(tokens_per_picture // 2, tokens_per_picture * 3 // 2, pictures.sum())
    seen = np.bincount(np.repeat(np.arange(num_documents), pictures), sizes, num_documents).astype(np.int64)
    return np.stack([text + seen, pictures], axis=1)


def draw_web_lengths(num_tokens: int, *, seed: int) -> Lengths:
    """Documents of together at most `num_tokens`, lengths lognormal(6.2, 1.1) as on the web."""
    rng = np.random.default_rng(seed)
    lengths = np.maximum(1, rng.lognormal(6.2, 1.1, num_tokens // 500).astype(np.int64))
    return lengths[: np.searchsorted(np.cumsum(lengths), num_tokens, side="right")]


def kept_tokens(lengths: Lengths, settings: PackingSettings) -> Lengths:
    """How many tokens of each document belong in rows."""
    if settings.long == "drop":
        return np.where(lengths > settings.length, 0, lengths)
    return np.minimum(lengths, settings.length) if settings.long == "truncate" else lengths


def count_uses(packing: Packing, lengths: Lengths) -> npt.NDArray[np.int64]:
    """How often each token is in a row, the documents laid end to end."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    spans = zip(packing.documents, packing.starts, packing.lengths, strict=True)
    tokens = [np.arange(size) + offsets[document] + start for document, start, size in spans]
    return np.bincount(np.concatenate([np.zeros(0, np.int64), *tokens]), minlength=offsets[-1])


def tokens_per_row(packing: Packing) -> npt.NDArray[np.int64]:
    """How many tokens each row holds."""
    return np.diff(np.concatenate([[0], np.cumsum(packing.lengths, dtype=np.int64)])[packing.row_offsets])


def best_fit_decreasing(lengths: Lengths, settings: PackingSettings) -> int:
    """The number of rows, by looking at every row for every piece; of equal rows, the one touched last."""
    pieces = [
        min(settings.length, size - start)
        for size in kept_tokens(lengths, settings).tolist()
        for start in range(0, size, settings.length)
    ]
    rows: list[list[int]] = []  # room, documents, moment of the last touch
    for moment, size in enumerate(sorted(pieces, reverse=True)):
        fitting = [row for row in rows if row[0] >= size and row[1] < (settings.max_documents or len(pieces))]
        row = min(fitting, key=lambda row: (row[0], -row[2]), default=None)
        if row is None:
            rows.append(row := [settings.length, 0, 0])
        row[:] = [row[0] - size, row[1] + 1, moment]
    return len(rows)

"""Tokenizing at work in one process: for text, and for conversations with their loss mask."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from penstock.schema import Ragged
from penstock.transforms._chat_mask import Conversation
from penstock.transforms._chat_rows import render_rows
from penstock.transforms._chat_template import ChatTemplate
from penstock.transforms._keep import infer_types, read_kept, take_kept
from penstock.transforms._rows import BadRows, read_text
from penstock.transforms._token_maker import TokenMaker
from penstock.transforms._tokenizer_check import join_texts
from penstock.transforms._transforms import Output

if TYPE_CHECKING:
    from penstock.sources import Records

Pairs = tuple[tuple[str, str | None], ...]


class OpenTokenize:
    """Text to `tokens`."""

    def __init__(self, maker: TokenMaker, column: str, keep: Pairs, types: dict[str, str] | None) -> None:
        self._maker, self._column, self._keep, self._types = maker, column, keep, types

    def __call__(self, records: Records) -> Output:
        """Tokens of these rows, and what is kept beside them."""
        bad = BadRows(records)
        kept = self._read_kept(records, bad)
        rows = read_text(records, self._column, bad)
        places = bad.good_places()
        ids, offsets = self._maker.encode(rows.take(places), records, places)
        columns = {"tokens": self._maker.frame(ids, offsets), **take_kept(kept, places, records.num_rows)}
        return Output(columns, places, bad.errors())

    def _read_kept(self, records: Records, bad: BadRows) -> dict[str, Any]:
        if self._types is None:
            self._types = infer_types(self._keep, records)
        return read_kept(records, self._types, bad)


class OpenChat(OpenTokenize):
    """Conversations to `tokens` and `loss_mask`."""

    def __init__(
        self,
        maker: TokenMaker,
        column: str,
        keep: Pairs,
        types: dict[str, str] | None,
        template: ChatTemplate,
        tools_column: str | None,
        with_mask: bool,
    ) -> None:
        super().__init__(maker, column, keep, types)
        self._template, self._tools_column, self._with_mask = template, tools_column, with_mask

    def __call__(self, records: Records) -> Output:
        """Tokens of these conversations, and which of them the assistant said."""
        bad = BadRows(records)
        kept = self._read_kept(records, bad)
        rendered = render_rows(records, self._column, self._tools_column, self._template, self._with_mask, bad)
        places = bad.good_places()
        said = [conversation for place in places if (conversation := rendered[place]) is not None]
        rows = join_texts([conversation.text for conversation in said])
        ids, offsets = self._maker.encode(rows, records, places)
        columns: dict[str, Any] = {"tokens": self._maker.frame(ids, offsets)}
        if self._with_mask:
            columns["loss_mask"] = self._make_mask(said, ids, offsets)
        return Output({**columns, **take_kept(kept, places, records.num_rows)}, places, bad.errors())

    def _make_mask(self, said: list[Conversation], ids: NDArray[Any], offsets: NDArray[np.int64]) -> Ragged:
        masks = [
            mark_overlaps(*self._maker.locate(conversation.text, ids[a:b]), _byte_spans(conversation))
            for conversation, (a, b) in zip(said, itertools.pairwise(offsets), strict=True)
        ]
        is_last = np.array([conversation.ends_with_assistant for conversation in said], bool)
        return self._maker.frame_mask(np.concatenate([np.empty(0, bool), *masks]), offsets, is_last)


def mark_overlaps(
    begins: NDArray[np.int64], ends: NDArray[np.int64], spans: tuple[tuple[int, int], ...]
) -> NDArray[np.bool_]:
    """Which of the ranges share something with a span, which is Hugging Face's rule; spans are in order and apart."""
    if not spans:
        return np.zeros(len(begins), bool)
    starts, stops = np.array(spans, np.int64).T
    following = np.searchsorted(stops, begins, side="right")
    is_inside = following < len(stops)
    overlaps: NDArray[np.bool_] = is_inside & (starts[np.minimum(following, len(stops) - 1)] < ends) & (begins < ends)
    return overlaps


def _byte_spans(said: Conversation) -> tuple[tuple[int, int], ...]:
    if said.text.isascii():
        return said.spans
    return tuple((len(said.text[:a].encode()), len(said.text[:b].encode())) for a, b in said.spans)

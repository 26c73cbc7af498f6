"""Tokenizing at work in one process: for text, and for conversations with their loss mask."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from penstock.preparation._chat_mask import Conversation, render_conversation
from penstock.preparation._chat_template import ChatTemplate, TemplateRefused
from penstock.preparation._keep import infer_types, read_kept, take_kept
from penstock.preparation._rows import BadRows, ByteRows, find_column, is_arrow, read_text
from penstock.preparation._token_maker import TokenMaker
from penstock.preparation._tokenizer_check import join_texts
from penstock.preparation._tokenizer_engines import HuggingFaceEngine
from penstock.preparation._transforms import Output
from penstock.schema import Ragged

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
        self._token_lengths = maker.token_lengths() if with_mask else None

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
            columns["loss_mask"] = self._make_mask(said, rows, ids, offsets)
        return Output({**columns, **take_kept(kept, places, records.num_rows)}, places, bad.errors())

    def _make_mask(
        self, said: list[Conversation], rows: ByteRows, ids: NDArray[Any], offsets: NDArray[np.int64]
    ) -> Ragged:
        masks = [
            self._mask_of(conversation, rows.values[a:b], ids[c:d])
            for conversation, (a, b), (c, d) in zip(
                said, itertools.pairwise(rows.offsets), itertools.pairwise(offsets), strict=True
            )
        ]
        is_last = np.array([conversation.ends_with_assistant for conversation in said], bool)
        return self._maker.frame_mask(np.concatenate([np.empty(0, bool), *masks]), offsets, is_last)

    def _mask_of(self, said: Conversation, text: NDArray[np.uint8], ids: NDArray[Any]) -> NDArray[np.bool_]:
        """Tokens that hold at least one of the assistant's characters, which is Hugging Face's rule too."""
        ends = self._token_ends(text, ids)
        if ends is not None:
            return mark_overlaps(np.concatenate([[0], ends[:-1]]), ends, _byte_spans(said))
        reference = self._maker.reference
        assert isinstance(reference, HuggingFaceEngine), "only a tokenizer.json can have tokens that do not tile the text"
        _, characters = reference.spans(said.text)
        bounds = np.array(characters, np.int64).reshape(-1, 2)
        return mark_overlaps(bounds[:, 0], bounds[:, 1], said.spans)

    def _token_ends(self, text: NDArray[np.uint8], ids: NDArray[Any]) -> NDArray[np.int64] | None:
        """Byte at which each token ends, if tokens tile the text: with a normalizer, or stripping tokens, they do not."""
        if not len(ids):
            return np.empty(0, np.int64)
        if self._maker.is_bytes:
            return np.arange(1, len(ids) + 1)
        if self._token_lengths is None:
            return None
        ends = np.cumsum(self._token_lengths[ids])
        return ends if ends[-1] == len(text) else None


def mark_overlaps(
    begins: NDArray[np.int64], ends: NDArray[np.int64], spans: tuple[tuple[int, int], ...]
) -> NDArray[np.bool_]:
    """Which of the ranges share something with a span; spans are in order and apart."""
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


def render_rows(
    records: Records, column: str, tools_column: str | None, template: ChatTemplate, with_mask: bool, bad: BadRows
) -> list[Conversation | None]:
    """Every conversation rendered; None where the row is bad."""
    tools = _values(records, tools_column) if tools_column else itertools.repeat(None)
    rendered: list[Conversation | None] = []
    for place, (value, row_tools) in enumerate(zip(_values(records, column), tools, strict=False)):
        try:
            messages = parse_messages(value, column)
            rendered.append(render_conversation(template, messages, _parse_list(row_tools), with_mask))
            rendered[-1].text.encode()  # type: ignore[union-attr]
        except TemplateRefused as error:
            bad.add(place, "chat_template", f"Column {column!r}: the chat template refuses this conversation: {error}.")
        except _BadMessages as error:
            bad.add(place, error.reason, str(error))
        except UnicodeEncodeError:
            bad.add(place, "invalid_utf8", f"Column {column!r} has half a surrogate pair, which no UTF-8 holds.")
        del rendered[place:] if place in bad else rendered[place + 1 :]
        rendered += [None] * (place + 1 - len(rendered))
    return rendered

"""Tokenize rows in one process: text, and conversations with their loss mask.

column of text ------------------------> documents -> engine -> ids -> BOS, EOS, dtype -> tokens
column of messages -> chat template ---> documents -> engine -> ids -> ...             -> tokens
                             spans of the assistant -> bytes of each token -------------> loss_mask
"""

from __future__ import annotations

import collections
import functools
import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import FormatError, TokenizerMismatch
from penstock.schema import Ragged
from penstock.sources import Records
from penstock.transforms._conversations import ChatSettings, Conversation, ConversationReader
from penstock.transforms._engine_choice import ChosenEngine, check_document, choose_checked, join_texts
from penstock.transforms._keep import infer_types, read_kept, take_kept
from penstock.transforms._kernels import frame_documents
from penstock.transforms._special_tokens import MARK, SPELLED, Guard
from penstock.transforms._tokenizer_engines import Bounds, Ids, TokenizerEngine, open_reference
from penstock.transforms._tokenizer_source import TokenizerSource
from penstock.transforms._transform import BadRows, Output, read_text

Pairs = tuple[tuple[str, str | None], ...]
_KEY_DIGITS = 15
WITHOUT_TARGETS = "conversations_without_a_token_to_learn"
_NO_ASSISTANT = "conversations_with_the_role_{}_in_place_of_assistant"


class OpenTokenize:
    """Text to `tokens`."""

    def __init__(
        self, maker: TokenMaker, column: str, keep: Pairs, types: dict[str, str] | None, guard: Guard | None
    ) -> None:
        self._maker, self._column, self._keep, self._types, self._guard = maker, column, keep, types, guard

    def __call__(self, records: Records) -> Output:
        bad = BadRows(records)
        kept = self._read_kept(records, bad)
        rows = read_text(records, self._column, bad)
        num_spelled = self._guard.check_documents(rows, bad) if self._guard is not None else 0
        places = bad.good_places()
        ids, offsets = self._maker.encode(rows.take(places), records, places)
        columns = {"tokens": self._maker.frame(ids, offsets), **take_kept(kept, places, records.num_rows)}
        return Output(columns, places, bad.errors(), {SPELLED: num_spelled} if num_spelled else {})

    def _read_kept(self, records: Records, bad: BadRows) -> dict[str, Any]:
        if self._types is None:
            self._types = infer_types(self._keep, records)
        return read_kept(records, self._types, bad)


class OpenChat(OpenTokenize):
    """Conversations to `tokens` and `loss_mask`; pairs of them to `chosen`, `rejected` and a mask for each."""

    def __init__(self, maker: TokenMaker, settings: ChatSettings, keep: Pairs, types: dict[str, str] | None) -> None:
        super().__init__(maker, settings.layout.column, keep, types, settings.guard)
        self._settings, self._reader = settings, ConversationReader(settings)
        maker.check_controls()

    def __call__(self, records: Records) -> Output:
        bad = BadRows(records)
        kept = self._read_kept(records, bad)
        sides = {side: self._reader.read(records, side, bad) for side in self._settings.layout.sides}
        places = bad.good_places()
        columns: dict[str, Any] = {}
        noticed: collections.Counter[str] = collections.Counter()
        for side, rendered in sides.items():
            said = [conversation for place in places if (conversation := rendered[place]) is not None]
            columns |= self._tokenize(side, said, records, places, noticed)
            if self._settings.pictures is not None:
                columns |= self._settings.pictures.collect([conversation.pictures for conversation in said])
        columns |= take_kept(kept, places, records.num_rows)
        return Output(columns, places, bad.errors(), +noticed)  # without those that are 0

    def _tokenize(
        self,
        side: str,
        said: list[Conversation],
        records: Records,
        places: NDArray[np.int64],
        noticed: collections.Counter[str],
    ) -> dict[str, Any]:
        tokens, loss_mask = made_columns(side)
        rows = join_texts([conversation.text for conversation in said])
        ids, offsets = self._maker.encode(rows, records, places)
        columns: dict[str, Any] = {tokens: self._maker.frame(ids, offsets)}
        if self._guard is not None and self._guard.policy == "count":
            noticed[SPELLED] += sum(conversation.num_spelled for conversation in said)
        if self._settings.loss_on is not None:
            columns[loss_mask] = mask = self._make_mask(said, ids, offsets)
            noticed[WITHOUT_TARGETS] += _count_empty(mask)
            noticed.update(_NO_ASSISTANT.format(each.stranger) for each in said if each.stranger)
        return columns

    def _make_mask(self, said: list[Conversation], ids: NDArray[Any], offsets: NDArray[np.int64]) -> Ragged:
        masks = [
            mark_overlaps(*self._maker.locate(conversation.text, ids[a:b]), _byte_spans(conversation))
            for conversation, (a, b) in zip(said, itertools.pairwise(offsets), strict=True)
        ]
        is_last = np.array([conversation.ends_with_assistant for conversation in said], bool)
        return self._maker.frame_mask(np.concatenate([np.empty(0, bool), *masks]), offsets, is_last)


def made_columns(side: str) -> tuple[str, str]:
    """Names of the columns of tokens and of the loss mask; `side` is "" for the only conversation of a row."""
    return (side, f"{side}_loss_mask") if side else ("tokens", "loss_mask")


class TokenMaker:
    """A loaded tokenizer, with the tokens that go around each document."""

    def __init__(
        self,
        source: TokenizerSource,
        chosen: ChosenEngine,
        bos_id: int | None,
        eos_id: int | None,
        dtype: np.dtype[Any],
    ) -> None:
        self._source = source
        self._engine = chosen.open(source)
        self._is_checked = chosen.is_fast
        self._key = int(source.sha256[:_KEY_DIGITS], 16)
        self._bos = -1 if bos_id is None else bos_id
        self._eos = -1 if eos_id is None else eos_id
        self._dtype = dtype
        # The first call may load half of awkward (0.1 s): better now than in the first batch.
        self.frame(*self._engine.encode(np.frombuffer(b"a", np.uint8), np.array([0, 1])))

    @functools.cached_property
    def reference(self) -> TokenizerEngine:
        """The reference engine, loaded when first needed."""
        return open_reference(self._source) if self._is_checked else self._engine

    def locate(self, text: str, ids: NDArray[Any]) -> Bounds:
        """Bytes of the text that each token covers."""
        bounds = self._engine.locate(text, ids) or self.reference.locate(text, ids)
        assert bounds is not None, "the reference always knows where its tokens are"
        return bounds

    def check_controls(self) -> None:
        """Make sure that templates can write every special token.

        Raises:
            FormatError: the tokenizer does not find one.
        """
        controls = [token for token in self._source.specials if token.startswith(MARK)]
        rows = join_texts(controls)
        ids, offsets = self._engine.encode(rows.values, rows.offsets)
        for token, (begin, end) in zip(controls, itertools.pairwise(offsets), strict=True):
            if self._source.specials[token] not in ids[begin:end]:
                name = token.removeprefix(MARK)
                raise FormatError(
                    f"{self._source.name} normalizes its special token {name!r}, so it cannot be distinguished from "
                    "text. Use special_tokens='allow' (--special-tokens allow)."
                )

    def encode(self, rows: Ragged, records: Records, places: NDArray[np.int64]) -> Ids:
        """Ids of the documents that came from these places of the records.

        Raises:
            TokenizerMismatch: a document that was checked differs from the reference.
        """
        ids, offsets = self._engine.encode(rows.values, rows.offsets)
        if not self._is_checked:
            return ids, offsets
        numbers = records.row_numbers()[places]
        for chosen in choose_checked(numbers, np.diff(rows.offsets), self._key):
            text = rows.values[rows.offsets[chosen] : rows.offsets[chosen + 1]]
            found = ids[offsets[chosen] : offsets[chosen + 1]]
            difference = check_document(self._engine, self.reference, text, found)
            if difference is not None:
                raise TokenizerMismatch(
                    f"gigatoken and the reference differ in row {int(numbers[chosen]):,} of the split, {difference}. "
                    f"Run again with engine='reference', and report this text to the authors of gigatoken."
                )
        return ids, offsets

    def frame(self, ids: NDArray[Any], offsets: NDArray[np.int64]) -> Ragged:
        """Ids in the column's dtype, with BOS and EOS."""
        return self._frame(ids, offsets, self._bos, self._eos, self._dtype)

    def frame_mask(self, mask: NDArray[np.bool_], offsets: NDArray[np.int64], is_last: NDArray[np.bool_]) -> Ragged:
        """The mask of those tokens: never BOS, and EOS if the assistant has the last word."""
        framed = self._frame(mask.view(np.uint8), offsets, min(self._bos, 0), min(self._eos, 0), np.dtype(np.uint8))
        if self._eos >= 0:
            framed.values[framed.offsets[1:] - 1] = is_last
        return Ragged(framed.values.view(np.bool_), framed.offsets)

    @staticmethod
    def _frame(ids: NDArray[Any], offsets: NDArray[np.int64], first: int, last: int, dtype: np.dtype[Any]) -> Ragged:
        num_added = sum(token >= 0 for token in (first, last))
        if not num_added:
            return Ragged(ids.astype(dtype, copy=False), offsets)
        framed = np.empty(len(ids) + num_added * (len(offsets) - 1), dtype)
        frame_documents(ids, offsets, first, last, framed)
        return Ragged(framed, offsets + num_added * np.arange(len(offsets)))


def smallest_dtype(vocab_size: int) -> np.dtype[Any]:
    """Smallest unsigned dtype that holds ids below `vocab_size`."""
    return np.min_scalar_type(max(0, vocab_size - 1)).newbyteorder("<")


def mark_overlaps(
    begins: NDArray[np.int64], ends: NDArray[np.int64], spans: tuple[tuple[int, int], ...]
) -> NDArray[np.bool_]:
    """Which ranges overlap a span, by Hugging Face's rule; spans are in order and do not touch."""
    if not spans:
        return np.zeros(len(begins), bool)
    starts, stops = np.array(spans, np.int64).T
    following = np.searchsorted(stops, begins, side="right")
    is_inside = following < len(stops)
    overlaps: NDArray[np.bool_] = is_inside & (starts[np.minimum(following, len(stops) - 1)] < ends) & (begins < ends)
    return overlaps


def _count_empty(mask: Ragged) -> int:
    """Samples without a token to learn from."""
    totals = np.concatenate([[0], np.cumsum(mask.values)])
    return int((totals[mask.offsets[1:]] == totals[mask.offsets[:-1]]).sum())


def _byte_spans(said: Conversation) -> tuple[tuple[int, int], ...]:
    if said.text.isascii():
        return said.spans
    return tuple((len(said.text[:a].encode()), len(said.text[:b].encode())) for a, b in said.spans)

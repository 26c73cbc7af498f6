"""The work both text and chat share: encode, check one document in 10,000, add BOS and EOS."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from penstock.schema import Ragged
from penstock.transforms._tokenizer_check import TokenizerMismatch, check_document, choose_checked
from penstock.transforms._tokenizer_choice import ChosenEngine
from penstock.transforms._tokenizer_engines import Bounds, Ids, TokenizerEngine, open_reference
from penstock.transforms._tokenizer_source import TokenizerSource
from penstock.transforms._transforms import row_number

if TYPE_CHECKING:
    from penstock.sources import Records

_KEY_DIGITS = 15


def smallest_dtype(vocab_size: int) -> np.dtype[Any]:
    """Smallest unsigned dtype that holds ids below `vocab_size`."""
    return np.min_scalar_type(max(0, vocab_size - 1)).newbyteorder("<")


class TokenMaker:
    """A loaded tokenizer, with what goes around each document."""

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
        self._reference: TokenizerEngine | None = None
        self._key = int(source.sha256[:_KEY_DIGITS], 16)
        self._bos = -1 if bos_id is None else bos_id
        self._eos = -1 if eos_id is None else eos_id
        self._dtype = dtype
        # The first call loads compiled code and half of awkward, 0.5 s in all: part of opening, not of the first batch.
        self.frame(*self._engine.encode(np.frombuffer(b"a", np.uint8), np.array([0, 1])))

    @property
    def reference(self) -> TokenizerEngine:
        """The reference engine, loaded when first asked for."""
        if self._reference is None:
            self._reference = open_reference(self._source) if self._is_checked else self._engine
        return self._reference

    def locate(self, text: str, ids: NDArray[Any]) -> Bounds:
        """Bytes at which each token of a text begins and ends."""
        bounds = self._engine.locate(text, ids) or self.reference.locate(text, ids)
        assert bounds is not None, "the reference always knows where its tokens are"
        return bounds

    def encode(self, rows: Ragged, records: Records, places: NDArray[np.int64]) -> Ids:
        """Ids of the documents, which came from these places of the records.

        Raises:
            TokenizerMismatch: a document that was checked differs from the reference.
        """
        ids, offsets = self._engine.encode(rows.values, rows.offsets)
        if self._is_checked:
            self._check(rows, records, places, ids, offsets)
        return ids, offsets

    def _check(
        self,
        rows: Ragged,
        records: Records,
        places: NDArray[np.int64],
        ids: NDArray[Any],
        offsets: NDArray[np.int64],
    ) -> None:
        numbers = records.row_numbers()[places]
        for chosen in choose_checked(numbers, np.diff(rows.offsets), self._key):
            text = rows.values[rows.offsets[chosen] : rows.offsets[chosen + 1]]
            found = ids[offsets[chosen] : offsets[chosen + 1]]
            difference = check_document(self._engine, self.reference, text, found)
            if difference is not None:
                row = row_number(records, int(places[chosen]))
                raise TokenizerMismatch(
                    f"gigatoken and the reference differ in row {row:,} of the split, {difference}. "
                    f"Run again with engine='reference', and report this text to gigatoken."
                )

    def frame(self, ids: NDArray[Any], offsets: NDArray[np.int64]) -> Ragged:
        """Ids in the column's dtype, with BOS and EOS."""
        return self._frame(ids, offsets, self._bos, self._eos, self._dtype)

    def frame_mask(self, mask: NDArray[np.bool_], offsets: NDArray[np.int64], is_last: NDArray[np.bool_]) -> Ragged:
        """The mask of those tokens: never BOS, and EOS where the document ends with what is to be learnt."""
        framed = self._frame(mask.view(np.uint8), offsets, min(self._bos, 0), min(self._eos, 0), np.dtype(np.uint8))
        if self._eos >= 0:
            framed.values[framed.offsets[1:] - 1] = is_last
        return Ragged(framed.values.view(np.bool_), framed.offsets)

    @staticmethod
    def _frame(ids: NDArray[Any], offsets: NDArray[np.int64], first: int, last: int, dtype: np.dtype[Any]) -> Ragged:
        num_added = (first >= 0) + (last >= 0)
        if not num_added:
            return Ragged(ids.astype(dtype, copy=False), offsets)
        from penstock.transforms._kernels import frame_documents

        framed = np.empty(len(ids) + num_added * (len(offsets) - 1), dtype)
        frame_documents(ids, offsets, first, last, framed)
        return Ragged(framed, offsets + num_added * np.arange(len(offsets)))

"""The fast engine: gigatoken, fed with the buffer as it is.

Documents go in and ids come out as awkward lists over flat arrays, so there is no Python per document; 4 MB cost about
0.5 ms around the call. It works in the calling thread: a machine is filled with processes, one per core.
It trusts its input to be UTF-8, which `_rows.py` has checked.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.transforms._tokenizer_engines import Bounds, EngineFailed, Ids, panics_named, tile
from penstock.transforms._tokenizer_source import TokenizerSource, import_text

# NOTE [when gigatoken is loaded anew]
# gigatoken 0.10.0 remembers every word it has met, without a limit, in a table that doubles. Beginning again costs
# 0.4 s (loading, then meeting the frequent words once more); doubling from 128 to 256 MB costs 1 s, and takes both for
# a moment. A process over the soft limit has most likely just doubled, so its table is half empty and paid for: it is
# used for nearly as much text again, which the next doubling cannot come before unless the text changes. Over the hard
# limit it goes at once. Limits move up with what the process has when gigatoken is loaded, its shard included.
# Text in which every word is new fills the table so fast that it would double again before a limit is seen, so
# who grows that much over so little text begins again before: 1.09 GB at the peak without, 0.63 with.
# Python source with a new word in fourteen: 292 MB after 0.3 GB of text, 416 after 0.8, 553 after 1.6, 808 at the peak.
_SOFT_LIMIT_BYTES = 512 << 20
_SOFT_GROWTH_BYTES = 128 << 20
_HARD_EXTRA_BYTES = 192 << 20
_TEXT_AGAIN = 0.8
_QUICK_LIMIT_BYTES, _QUICK_GROWTH_BYTES = 460 << 20, 340 << 20
_QUICK_TEXT_BYTES = 128 << 20
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
# tiktoken keeps its split pattern as text; gigatoken has each of these as code. Equality is tested, so a wrong
# entry costs speed, never a token.
_SCHEME_MARKS = {
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++",
    "gpt4": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+",
    "o200k": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
}

_log = logging.getLogger(__name__)


class GigatokenEngine:
    """The fast engine.

    Raises:
        MissingExtra: gigatoken is not installed.
        EngineFailed: it does not support this tokenizer.
    """

    name = "gigatoken"

    def __init__(self, source: TokenizerSource) -> None:
        self._gigatoken = import_text("gigatoken")
        self._awkward = import_text("awkward")
        self._source = source
        self._lengths: NDArray[np.int64] | None = None
        self._load()
        # Once: right after a table went, the allocator may still have its memory.
        self._quick_limit_bytes = max(_QUICK_LIMIT_BYTES, anonymous_bytes() + _QUICK_GROWTH_BYTES)

    def _load(self) -> None:
        self._tokenizer: Any = None  # the old one goes first: two would be the peak
        with panics_named("gigatoken", self._source.name):
            self._tokenizer = _load_gigatoken(self._gigatoken, self._source)
        self._soft_limit_bytes = max(_SOFT_LIMIT_BYTES, anonymous_bytes() + _SOFT_GROWTH_BYTES)
        self._text_bytes = 0
        self._most_text_bytes: float | None = None

    def _limit_memory(self, num_bytes: int) -> None:
        """Load gigatoken anew before it outgrows the worker; see NOTE [when gigatoken is loaded anew]."""
        used_bytes, self._text_bytes = anonymous_bytes(), self._text_bytes + num_bytes
        is_quick = used_bytes > self._quick_limit_bytes and self._text_bytes < _QUICK_TEXT_BYTES
        if used_bytes <= self._soft_limit_bytes and not is_quick:
            return
        if self._most_text_bytes is None:
            self._most_text_bytes = self._text_bytes * (1 + _TEXT_AGAIN)
        is_large = used_bytes > self._soft_limit_bytes + _HARD_EXTRA_BYTES
        if is_quick or is_large or self._text_bytes > self._most_text_bytes:
            _log.info("gigatoken is loaded anew: this process has %d MB", used_bytes >> 20)
            self._load()

    def encode(self, values: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Ids:
        """Ids of documents that are valid UTF-8."""
        self._limit_memory(len(values))
        with panics_named("gigatoken", self._source.name):
            layout = self._tokenizer.encode_batch(self._wrap(values, offsets), parallel=False).layout
        ids, ends = np.asarray(layout.content.data), np.asarray(layout.offsets.data)
        assert len(ends) == len(offsets), "gigatoken gave another number of documents"
        return ids[ends[0] : ends[-1]], ends.astype(np.int64, copy=False) - ends[0]

    def _wrap(self, values: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Any:
        """The documents as an awkward Array of byte strings; nothing is copied."""
        contents, index = self._awkward.contents, self._awkward.index
        characters = contents.NumpyArray(values, parameters={"__array__": "byte"})
        lists = contents.ListOffsetArray(index.Index64(offsets), characters, parameters={"__array__": "bytestring"})
        return self._awkward.Array(lists)

    def locate(self, text: str, ids: NDArray[Any]) -> Bounds | None:
        """Bytes that each token of a text stands for; None when tokens do not tile it."""
        if self._lengths is None:
            self._lengths = _count_bytes(self._tokenizer.vocab, self._tokenizer.vocab_size)
        # With a normalizer, or added tokens that swallow the space beside them, the tokens spell another text.
        return tile(self._lengths[ids]) if self._tokenizer.decode(ids) == text.encode() else None


def anonymous_bytes() -> int:
    """Memory of this process that no file stands behind; 0 where the system does not say."""
    try:
        fields = Path("/proc/self/statm").read_bytes().split()
    except OSError:
        return 0
    return (int(fields[1]) - int(fields[2])) * _PAGE_BYTES


def _count_bytes(vocabulary: dict[int, bytes], size: int) -> NDArray[np.int64]:
    lengths = np.zeros(size, np.int64)
    lengths[list(vocabulary)] = [len(token) for token in vocabulary.values()]
    return lengths


def _load_gigatoken(gigatoken: Any, source: TokenizerSource) -> Any:
    if source.kind == "json":
        return gigatoken.Tokenizer.from_json(source.data)
    content = json.loads(source.data)
    scheme = next((name for name, mark in _SCHEME_MARKS.items() if content["pattern"].startswith(mark)), None)
    if scheme is None:
        raise EngineFailed(f"gigatoken has no splitter for the pattern of {source.name}.")
    by_rank = sorted(content["ranks"].items(), key=lambda entry: entry[1])
    with tempfile.NamedTemporaryFile(suffix=".tiktoken") as file:
        file.write(b"".join(f"{token} {rank}\n".encode() for token, rank in by_rank))
        file.flush()
        return gigatoken.Tokenizer.from_tiktoken(file.name, scheme, content["specials"])

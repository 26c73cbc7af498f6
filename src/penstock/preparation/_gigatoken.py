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

from penstock.preparation._tokenizer_engines import Bounds, EngineFailed, Ids, panics_named, tile
from penstock.preparation._tokenizer_source import TokenizerSource, import_text

# gigatoken 0.10.0 remembers every word it has met, without a limit: about 95 bytes for each, and a table that doubles.
# It is loaded anew (0.3 s for 32,000 tokens) when this process is past the limit and has grown by this much since the
# last time. Python source with new words took 78 MB for its first 34 MB, then 0.1 MB for each MB more.
_MEMORY_LIMIT_BYTES = 512 << 20
_MEMORY_GROWTH_BYTES = 192 << 20
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

    def _load(self) -> None:
        self._tokenizer: Any = None  # the old one goes first: two would be the peak
        with panics_named("gigatoken", self._source.name):
            self._tokenizer = _load_gigatoken(self._gigatoken, self._source)
        self._limit_bytes = max(_MEMORY_LIMIT_BYTES, anonymous_bytes() + _MEMORY_GROWTH_BYTES)

    def encode(self, values: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Ids:
        """Ids of documents that are valid UTF-8."""
        if anonymous_bytes() > self._limit_bytes:
            _log.info("gigatoken is loaded anew: this process has passed %d MB", self._limit_bytes >> 20)
            self._load()
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

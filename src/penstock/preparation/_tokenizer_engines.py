"""From the bytes of many documents to their token ids: one interface, four engines.

An engine takes documents side by side (`values`, `offsets`) and gives ids the same way. gigatoken reads
that buffer as it is, through awkward's list layout, and answers with one; 4 MB of Python source cost 0.5 ms
around it. The reference libraries take one `str` per document and are 10 to 100 times slower.

Each engine works in the calling thread: a machine is filled with processes, one per core.
"""

from __future__ import annotations

import base64
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PenstockError
from penstock.preparation._rows import make_offsets
from penstock.preparation._tokenizer_source import TokenizerSource, import_text

Ids = tuple[NDArray[Any], NDArray[np.int64]]
"""Ids of all documents side by side, and offsets from 0."""
Bounds = tuple[NDArray[np.int64], NDArray[np.int64]]
"""For each token, the bytes of the text where it begins and ends."""

# gigatoken 0.10.0 remembers every word it has met, without a limit: 95 bytes for each, measured. It is loaded anew
# (0.3 s for 32,000 tokens) when this process passes the limit, or grew by this much since the last time.
_MEMORY_LIMIT_BYTES = 640 << 20
_MEMORY_GROWTH_BYTES = 256 << 20
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_GROUP_BYTES = 1 << 20
# tiktoken keeps its split pattern as text; gigatoken has each of these as code. Equality is tested, so a wrong
# entry costs speed, never a token.
_SCHEME_MARKS = {
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++",
    "gpt4": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+",
    "o200k": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
}


class TokenizerEngine(Protocol):
    """Something that tokenizes, with no special tokens added around a document."""

    name: str

    def encode(self, values: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Ids:
        """Ids of documents that are valid UTF-8."""
        ...

    def locate(self, text: str, ids: NDArray[Any]) -> Bounds | None:
        """Where in its text each token stands; None when this engine cannot tell."""
        ...


class EngineFailed(PenstockError, RuntimeError):
    """A tokenizer library broke down on a document."""


class BytesEngine:
    """One token per byte."""

    name = "bytes"

    def encode(self, values: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Ids:
        """The bytes themselves."""
        return values, offsets

    def locate(self, text: str, ids: NDArray[Any]) -> Bounds:
        """A byte each."""
        return _tile(np.ones(len(ids), np.int64))


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
        with _panics_named("gigatoken", self._source.name):
            self._tokenizer = _load_gigatoken(self._gigatoken, self._source)
        self._limit_bytes = max(_MEMORY_LIMIT_BYTES, anonymous_bytes() + _MEMORY_GROWTH_BYTES)

    def encode(self, values: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Ids:
        """Ids of documents that are valid UTF-8."""
        if anonymous_bytes() > self._limit_bytes:
            self._load()
        with _panics_named("gigatoken", self._source.name):
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
        return _tile(self._lengths[ids]) if self._tokenizer.decode(ids) == text.encode() else None


class HuggingFaceEngine:
    """The reference for a `tokenizer.json`: the `tokenizers` library."""

    name = "tokenizers"

    def __init__(self, source: TokenizerSource) -> None:
        self._name = source.name
        # The post-processor adds nothing here, but it would take the space off where a token is said to begin.
        content = {**json.loads(source.data), "post_processor": None}
        self._tokenizer = import_text("tokenizers").Tokenizer.from_str(json.dumps(content))
        # A file may carry both from whoever saved it; they would cut and fill documents silently.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, values: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Ids:
        """Ids of documents that are valid UTF-8."""
        arrays: list[NDArray[np.uint32]] = []
        with _panics_named("tokenizers", self._name):
            for texts in _group(values, offsets):
                encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
                arrays += [np.array(encoding.ids, np.uint32) for encoding in encodings]
        return _join(arrays)

    def locate(self, text: str, ids: NDArray[Any]) -> Bounds:
        """Bytes that each token of a text stands for; tokens that share a character both have all of it."""
        with _panics_named("tokenizers", self._name):
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        assert len(encoding.ids) == len(ids), "these are not the tokens of this text"
        characters = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        if not text.isascii():
            sizes = np.fromiter((len(character.encode()) for character in text), np.int64, len(text))
            characters = make_offsets(sizes)[characters]
        return characters[:, 0], characters[:, 1]


class TiktokenEngine:
    """The reference for a tiktoken encoding; special tokens in the text are what they say, as with `tokenizers`."""

    name = "tiktoken"

    def __init__(self, source: TokenizerSource) -> None:
        content = json.loads(source.data)
        ranks = {base64.b64decode(token): rank for token, rank in content["ranks"].items()}
        self._name = source.name
        self._encoding = import_text("tiktoken").Encoding(
            source.name, pat_str=content["pattern"], mergeable_ranks=ranks, special_tokens=content["specials"]
        )

    def encode(self, values: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Ids:
        """Ids of documents that are valid UTF-8."""
        with _panics_named("tiktoken", self._name):
            texts = (text for group in _group(values, offsets) for text in group)
            return _join([self._encoding.encode_to_numpy(text, allowed_special="all") for text in texts])

    def locate(self, text: str, ids: NDArray[Any]) -> Bounds:
        """Bytes that each token of a text stands for."""
        pieces = self._encoding.decode_tokens_bytes(ids.tolist())
        return _tile(np.fromiter(map(len, pieces), np.int64, len(pieces)))


def open_reference(source: TokenizerSource) -> HuggingFaceEngine | TiktokenEngine | BytesEngine:
    """The engine whose answer counts."""
    if source.kind == "bytes":
        return BytesEngine()
    return HuggingFaceEngine(source) if source.kind == "json" else TiktokenEngine(source)


def anonymous_bytes() -> int:
    """Memory of this process that no file stands behind; 0 where the system does not say."""
    try:
        fields = Path("/proc/self/statm").read_bytes().split()
    except OSError:
        return 0
    return (int(fields[1]) - int(fields[2])) * _PAGE_BYTES


def _group(values: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Iterator[list[str]]:
    """Documents as text, about 1 MB at a time: the libraries keep 100 bytes per token of a batch."""
    begin = 0
    while begin < len(offsets) - 1:
        end = max(begin + 1, int(np.searchsorted(offsets, offsets[begin] + _GROUP_BYTES, side="right")) - 1)
        yield [str(values[offsets[i] : offsets[i + 1]].data, "utf-8") for i in range(begin, end)]
        begin = end


def _join(arrays: list[NDArray[np.uint32]]) -> Ids:
    lengths = np.fromiter(map(len, arrays), np.int64, len(arrays))
    ids = np.concatenate(arrays) if arrays else np.empty(0, np.uint32)
    return ids, make_offsets(lengths)


def _count_bytes(vocabulary: dict[int, bytes], size: int) -> NDArray[np.int64]:
    lengths = np.zeros(size, np.int64)
    lengths[list(vocabulary)] = [len(token) for token in vocabulary.values()]
    return lengths


def _tile(lengths: NDArray[np.int64]) -> Bounds:
    offsets = make_offsets(lengths)
    return offsets[:-1], offsets[1:]


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


class _panics_named:  # noqa: N801 (reads as a verb where it is used)
    """Turn what a Rust library throws, panics included (they are no `Exception`), into `EngineFailed`."""

    def __init__(self, library: str, name: str) -> None:
        self._library, self._name = library, name

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is None or isinstance(error, (KeyboardInterrupt, SystemExit, MemoryError, PenstockError)):
            return
        raise EngineFailed(f"{self._library} failed with the tokenizer {self._name}: {error}") from error

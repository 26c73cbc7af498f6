"""From the bytes of many documents to their token ids: the interface, and the engines whose answer counts.

An engine takes documents side by side (`values`, `offsets`) and gives ids the same way. The reference
libraries take one `str` per document and are 10 to 100 times slower than `_gigatoken.py`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PenstockError
from penstock.schema import offsets_of
from penstock.transforms._tokenizer_source import TokenizerSource, import_text

Ids = tuple[NDArray[Any], NDArray[np.int64]]
"""Ids of all documents side by side, and offsets from 0."""
Bounds = tuple[NDArray[np.int64], NDArray[np.int64]]
"""For each token, the bytes of the text where it begins and ends."""

_GROUP_BYTES = 1 << 20


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
        return tile(np.ones(len(ids), np.int64))


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
        with panics_named("tokenizers", self._name):
            for texts in _group(values, offsets):
                encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
                arrays += [np.array(encoding.ids, np.uint32) for encoding in encodings]
        return _join(arrays)

    def locate(self, text: str, ids: NDArray[Any]) -> Bounds:
        """Bytes that each token of a text stands for; tokens that share a character both have all of it."""
        with panics_named("tokenizers", self._name):
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        assert len(encoding.ids) == len(ids), "these are not the tokens of this text"
        characters = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        if not text.isascii():
            sizes = np.fromiter((len(character.encode()) for character in text), np.int64, len(text))
            characters = offsets_of(sizes)[characters]
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
        with panics_named("tiktoken", self._name):
            texts = (text for group in _group(values, offsets) for text in group)
            return _join([self._encoding.encode_to_numpy(text, allowed_special="all") for text in texts])

    def locate(self, text: str, ids: NDArray[Any]) -> Bounds:
        """Bytes that each token of a text stands for."""
        pieces = self._encoding.decode_tokens_bytes(ids.tolist())
        return tile(np.fromiter(map(len, pieces), np.int64, len(pieces)))


def open_reference(source: TokenizerSource) -> HuggingFaceEngine | TiktokenEngine | BytesEngine:
    """The engine whose answer counts."""
    if source.kind == "bytes":
        return BytesEngine()
    return HuggingFaceEngine(source) if source.kind == "json" else TiktokenEngine(source)


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
    return ids, offsets_of(lengths)


def tile(lengths: NDArray[np.int64]) -> Bounds:
    """Where tokens of these lengths stand when they follow each other without a gap."""
    offsets = offsets_of(lengths)
    return offsets[:-1], offsets[1:]


class panics_named:  # noqa: N801 (reads as a verb where it is used)
    """Turn what a Rust library throws, panics included (they are no `Exception`), into `EngineFailed`."""

    def __init__(self, library: str, name: str) -> None:
        self._library, self._name = library, name

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is None or isinstance(error, (KeyboardInterrupt, SystemExit, MemoryError, PenstockError)):
            return
        raise EngineFailed(f"{self._library} failed with the tokenizer {self._name}: {error}") from error

"""From the bytes of many documents to their token ids: gigatoken, and the reference libraries it must agree with.
And from ids back to text, for people who want to read a row of a batch.

An engine takes documents side by side (`values`, `offsets`) and returns ids the same way. The references
(`tokenizers`, tiktoken) take one `str` per document and are 10 to 100 times slower than gigatoken.

# NOTE [when gigatoken is reloaded]
#   gigatoken 0.10.0 remembers every word it has seen, without limit, in a table that doubles:
#   about 60, 100, 180, 330, 630, 1,230 MB, with the old and the new table both in memory while it does.
# So it is reloaded once the process has grown by more than 256 MB since the last time: right after the step to
# 330 MB, which keeps a worker under 1 GB. Loading it and learning the frequent words again takes 0.1 to 0.4 s.
# Text in which every word is new (benchmarks/bench_tokenize.py): 0.63 GB at the peak for 110 MB of text, 1.9 GB without
# reloading, at the same speed. Python source in which one word in fourteen is new: reloaded once in 4 GB, 0.55 GB at
# the peak.
"""

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.errors import EngineFailed, FormatError, PenstockError
from penstock.schema import offsets_of
from penstock.transforms._tokenizer_source import (
    TokenizerSource,
    import_text,
    is_panic,
    load_tokenizer,
    make_encoding,
)

Ids = tuple[NDArray[Any], NDArray[np.int64]]
"""Ids of all documents side by side, and offsets from 0."""
Bounds = tuple[NDArray[np.int64], NDArray[np.int64]]
"""For each token, the bytes of the text at which it begins and ends."""

_MAX_GROWTH_BYTES = 256 << 20
_GROUP_BYTES = 1 << 20
_RUST_PLACE = re.compile(r"\s*Location:\s*\S+\.rs:\d+(:\d+)?")  # a place in their code, which means nothing to users
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
# tiktoken's split pattern is text, gigatoken's is code. Engines are compared before every run, so a wrong entry here
# costs speed, never a token.
_SCHEME_MARKS = {
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++",
    "gpt4": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+",
    "o200k": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
}


class TokenizerEngine(Protocol):
    """Something that tokenizes, without adding special tokens around a document."""

    name: str

    def encode(self, values: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Ids:
        """Ids of documents that are valid UTF-8."""
        ...

    def locate(self, text: str, ids: NDArray[Any]) -> Bounds | None:
        """Bytes of the text that each token covers; None if this engine cannot tell."""
        ...


class BytesEngine:
    """One token per byte."""

    name = "bytes"

    def encode(self, values: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Ids:
        return values, offsets

    def locate(self, text: str, ids: NDArray[Any]) -> Bounds:
        return _tile(np.ones(len(ids), np.int64))


class HuggingFaceEngine:
    """The reference for a `tokenizer.json`: the `tokenizers` library."""

    name = "tokenizers"

    def __init__(self, source: TokenizerSource) -> None:
        self._name = source.name
        # The post-processor adds nothing here, but it would cut the space off the reported start of a token.
        content = {**json.loads(source.data), "post_processor": None}
        self._tokenizer = import_text("tokenizers").Tokenizer.from_str(json.dumps(content))
        # A saved file may have these switched on; they would cut and pad documents silently.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        for token, index in source.specials.items():
            if self._tokenizer.token_to_id(token) != index:
                raise FormatError(
                    f"{source.name} gives its added token {token!r} several ids; save it again, or repair it."
                )

    def encode(self, values: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Ids:
        arrays: list[NDArray[np.uint32]] = []
        with _wrap_panics("tokenizers", self._name):
            for texts in _group(values, offsets):
                encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
                arrays += [np.array(encoding.ids, np.uint32) for encoding in encodings]
        return _join(arrays)

    def locate(self, text: str, ids: NDArray[Any]) -> Bounds:
        """Bytes of the text that each token covers; tokens that share a character each cover all of it."""
        with _wrap_panics("tokenizers", self._name):
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        assert len(encoding.ids) == len(ids), "these are not the tokens of this text"
        characters = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        if not text.isascii():
            sizes = np.fromiter((len(character.encode()) for character in text), np.int64, len(text))
            characters = offsets_of(sizes)[characters]
        return characters[:, 0], characters[:, 1]


class TiktokenEngine:
    """The reference for a tiktoken encoding; special tokens in the text count as such (see `_special_tokens`)."""

    name = "tiktoken"

    def __init__(self, source: TokenizerSource) -> None:
        self._name = source.name
        self._encoding = make_encoding(source)

    def encode(self, values: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Ids:
        with _wrap_panics("tiktoken", self._name):
            texts = (text for group in _group(values, offsets) for text in group)
            return _join([self._encoding.encode_to_numpy(text, allowed_special="all") for text in texts])

    def locate(self, text: str, ids: NDArray[Any]) -> Bounds:
        pieces = self._encoding.decode_tokens_bytes(ids.tolist())
        return _tile(np.fromiter(map(len, pieces), np.int64, len(pieces)))


class GigatokenEngine:
    """The fast engine: documents go in and ids come out as flat arrays, without Python code per document.

    The overhead is about 0.5 ms per 4 MB. It works in the calling thread: there is one process per core to fill the
    machine. It trusts its input to be UTF-8, which `read_text` has checked.

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
        self._tokenizer: Any = None  # free the old one first, so that there are never two in memory
        with _wrap_panics("gigatoken", self._source.name):
            self._tokenizer = _load_gigatoken(self._gigatoken, self._source)
        self._max_bytes = anonymous_bytes() + _MAX_GROWTH_BYTES

    def encode(self, values: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Ids:
        if anonymous_bytes() > self._max_bytes:  # see NOTE [when gigatoken is reloaded]
            self._load()
        with _wrap_panics("gigatoken", self._source.name):
            layout = self._tokenizer.encode_batch(self._wrap(values, offsets), parallel=False).layout
        ids, ends = np.asarray(layout.content.data), np.asarray(layout.offsets.data)
        assert len(ends) == len(offsets), "gigatoken returned a different number of documents"
        return ids[ends[0] : ends[-1]], ends.astype(np.int64, copy=False) - ends[0]

    def _wrap(self, values: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Any:
        """The documents as an awkward Array of byte strings; nothing is copied."""
        contents, index = self._awkward.contents, self._awkward.index
        characters = contents.NumpyArray(values, parameters={"__array__": "byte"})
        lists = contents.ListOffsetArray(index.Index64(offsets), characters, parameters={"__array__": "bytestring"})
        return self._awkward.Array(lists)

    def locate(self, text: str, ids: NDArray[Any]) -> Bounds | None:
        if self._lengths is None:
            self._lengths = _count_bytes(self._tokenizer.vocab, self._tokenizer.vocab_size)
        # With a normalizer, or added tokens that swallow the space beside them, the tokens spell a different text.
        return _tile(self._lengths[ids]) if self._tokenizer.decode(ids) == text.encode() else None


def anonymous_bytes() -> int:
    """Memory of this process that is not backed by a file; 0 if the system does not say."""
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


def open_reference(source: TokenizerSource) -> HuggingFaceEngine | TiktokenEngine | BytesEngine:
    """The engine that is right by definition."""
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


def _tile(lengths: NDArray[np.int64]) -> Bounds:
    """Bounds of tokens of these lengths, side by side."""
    offsets = offsets_of(lengths)
    return offsets[:-1], offsets[1:]


@contextlib.contextmanager
def _wrap_panics(library: str, tokenizer: str) -> Iterator[None]:
    """Turn whatever a Rust library raises, even panics (which are not an `Exception`), into `EngineFailed`."""
    try:
        yield
    except (MemoryError, PenstockError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        reason = _RUST_PLACE.sub("", str(error)).strip()
        raise EngineFailed(f"{library} failed with the tokenizer {tokenizer}: {reason}") from error


Decoder = Callable[[NDArray[Any] | list[int]], str]


def find_decoder(tokenizer: Any | None, made_with: Mapping[str, str]) -> Decoder | None:
    """A decoder with this tokenizer; if none is given, with "bytes", the one that needs no file, or else None.

    Args:
        tokenizer: Anything that `Tokenize` takes.
        made_with: Tokenizers that made the ids, name by digest, as in `Dataset.tokenizers`.

    Raises:
        ValueError: the ids were made with another tokenizer, so the text would be wrong.
    """
    if tokenizer is None:
        source = load_tokenizer("bytes")
        return _make_decoder(source) if set(made_with) == {source.sha256} else None
    source = load_tokenizer(tokenizer)
    if made_with and source.sha256 not in made_with:
        names = ", ".join(f"{name} ({digest[:12]}…)" for digest, name in made_with.items())
        raise ValueError(
            f"{source.name} ({source.sha256[:12]}…) is not the tokenizer that made these tokens: {names}. "
            "It would give a different text; give that tokenizer."
        )
    return _make_decoder(source)


def _make_decoder(source: TokenizerSource) -> Decoder:
    """Ids that the tokenizer does not have are left out: they may be anything, and its library may fail on them."""
    if source.kind == "bytes":
        return lambda ids: bytes(_below(ids, 256).astype(np.uint8)).decode(errors="replace")
    if source.kind == "tiktoken":
        encoding = make_encoding(source)
        known = {*encoding._mergeable_ranks.values(), *encoding._special_tokens.values()}
        return lambda ids: str(encoding.decode([token for token in np.asarray(ids).tolist() if token in known]))
    tokenizer = import_text("tokenizers").Tokenizer.from_str(source.data.decode())
    return lambda ids: str(tokenizer.decode(_below(ids, source.vocab_size).tolist(), skip_special_tokens=False))


def _below(ids: NDArray[Any] | list[int], limit: int) -> NDArray[Any]:
    array = np.asarray(ids)
    return array[(array >= 0) & (array < limit)]

"""Turn token ids back into text, for people who want to read a row of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.transforms._tokenizer_source import TokenizerSource, import_text, load_tokenizer, make_encoding

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
        return _make(source) if set(made_with) == {source.sha256} else None
    source = load_tokenizer(tokenizer)
    if made_with and source.sha256 not in made_with:
        names = ", ".join(f"{name} ({digest[:12]}…)" for digest, name in made_with.items())
        raise ValueError(
            f"{source.name} ({source.sha256[:12]}…) is not the tokenizer that made these tokens: {names}. "
            "It would give a different text; give that tokenizer."
        )
    return _make(source)


def _make(source: TokenizerSource) -> Decoder:
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

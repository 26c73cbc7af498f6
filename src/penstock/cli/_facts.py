"""A manifest's attributes in a few words: how samples were made, from what, and what was left out.

Attributes are JSON that anybody may have written, so a value may have any type: one that `prepare` would not write is
shown as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from penstock.errors import counted

_HASH = re.compile("[0-9a-f]{32,}")
_SHOWN_OF_TRANSFORM = ("column", "function", "size", "mode", "store", "keep")


def in_words(value: Any) -> str:
    """JSON on one line for people: empty values are left out, hashes are shortened."""
    if isinstance(value, Mapping):
        present = {key: part for key, part in value.items() if part not in (None, {}, [], "")}
        parts = [
            f"{key} ({in_words(part)})" if isinstance(part, Mapping) else f"{key} {in_words(part)}"
            for key, part in present.items()
        ]
        return ", ".join(parts) if parts else "nothing"
    if isinstance(value, list):
        return f"[{', '.join(map(in_words, value))}]"
    if isinstance(value, str):
        return f"{value[:12]}…" if _HASH.fullmatch(value) else value
    return f"{value:,}" if type(value) is int else str(value)


def in_short(key: str, attributes: Mapping[str, Any]) -> str | None:
    """An attribute for the screen; None for one that is shown elsewhere, or is for machines."""
    value = attributes[key]
    if key == "preparation" or (key == "images" and "transform" in attributes):
        return None
    tell, needs = _TELLERS.get(key, (in_words, ()))
    return tell(value) if isinstance(value, Mapping) and all(each in value for each in needs) else in_words(value)


def sources_of(attributes: Mapping[str, Any]) -> str | None:
    """From how many files, found by which patterns, a dataset was prepared; None if it does not say."""
    preparation = attributes.get("preparation")
    if not isinstance(preparation, Mapping):
        return None
    files, patterns = preparation.get("files"), preparation.get("patterns")
    if type(files) is not int or not isinstance(patterns, list) or not patterns:
        return "unknown"
    more = f" and {len(patterns) - 1} more" if len(patterns) > 1 else ""
    return f"{counted(files, 'file')}: {in_words(patterns[0])}{more}"


def _tokenizer(value: Mapping[str, Any]) -> str:
    ends = {"bos": "begins each document", "eos": "ends each document"}
    added = [
        f"{in_words(value.get(f'{end}_token'))} ({in_words(value.get(f'{end}_id'))}) {what}"
        for end, what in ends.items()
        if value.get(f"{end}_added") is True
    ]
    words = [in_words(value["name"]), f"{in_words(value['vocab_size'])} tokens", *added]
    policy = value.get("special_tokens")
    return ", ".join(
        [*words, f"special tokens in texts: {policy}"] if policy in ("allow", "refuse", "count") else words
    )


def _transform(value: Mapping[str, Any]) -> str:
    shown = {key: value[key] for key in _SHOWN_OF_TRANSFORM if key in value}
    chat = ["chat template"] if value.get("chat") else []
    rest = in_words(shown)
    return ", ".join([in_words(value["transform"]), *chat, *([rest] if rest != "nothing" else [])])


def _skipped(value: Mapping[str, Any]) -> str:
    rows, reasons = value["rows"], value.get("by_reason")
    if type(rows) is not int:
        return in_words(value)
    return "nothing" if rows == 0 else f"{counted(rows, 'row')} ({in_words(reasons)})"


def _packing(value: Mapping[str, Any]) -> str:
    indexes = value["indexes"]
    return f"rows are counted for {', '.join(indexes)}" if isinstance(indexes, Mapping) else in_words(value)


# How an attribute is shown, and which fields it must have for that.
_TELLERS: Mapping[str, tuple[Callable[[Mapping[str, Any]], str], tuple[str, ...]]] = {
    "tokenizer": (_tokenizer, ("name", "vocab_size")),
    "transform": (_transform, ("transform",)),
    "skipped": (_skipped, ("rows",)),
    "packing": (_packing, ("indexes",)),
}

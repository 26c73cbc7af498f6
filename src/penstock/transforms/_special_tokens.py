"""Keep special tokens that a text spells out apart from those that control the model.

Text from the web may contain `<|endoftext|>`, and a user may write `<|im_end|>`. As control tokens they would end a
document or a turn, so the author of the text could steer the model. They are encoded as ordinary text, unless
`special_tokens="allow"`.

    tokenizer   `seal_tokenizer` renames each special token T to MARK + T, a spelling that no accepted text contains
    document    goes in unchanged: what it spells out is text. One that contains MARK + T is a bad row
    chat        `Guard.defuse` marks special tokens in the messages, the template renders, then `Guard.seal` gives the
                special tokens that the template itself wrote their new spelling and removes the other marks

So there is one tokenizer for both, every engine can load it, and the id of a special token comes only from a template
or from `append_eos` and `prepend_bos`. That is stricter than `encode_special_tokens=True` of `tokenizers`, which gives
the same tokens for BPE, but is bypassed by a Unigram vocabulary, which has `</s>` as a word like any other.

A defused conversation must render to the same text as the original once its marks are removed: a template that looks
for special tokens in the messages is refused, not misread. One that cuts words out of them may still form a new one.

Only tokens that are flagged special count. Other added tokens (runs of spaces, Qwen's `<tool_call>`) are vocabulary. So
are the bytes of `byte_fallback` (`<0x0A>`), which `tokenizers` flags if it trained them: the model spells unknown
characters with them, and would have no name for them if they were renamed. A text that contains `<0x0A>` does not mean
the byte, so they are not added tokens in the sealed tokenizer.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from penstock.errors import FormatError
from penstock.schema import Ragged
from penstock.transforms._tokenizer_source import TokenizerSource, import_text
from penstock.transforms._transform import BadRows

MARK = "\ufdd2"
"""Precedes a special token in its private spelling, and a character of a message that begins one. A noncharacter: valid
in UTF-8, and meant for a program's internal use."""
_BREAK = "\ufdd3"
"""Inserted into a token that is text, and where a message begins or ends with what might be half of a token."""
SpecialTokens = Literal["text", "count", "refuse", "allow"]
REASON = "special_token"
SPELLED = "special_tokens_as_text"


def seal_tokenizer(source: TokenizerSource) -> TokenizerSource:
    """The same tokenizer, but with special tokens that no text can spell.

    Raises:
        FormatError: its vocabulary builds a special token from ordinary ones, or has no other spelling for one.
    """
    if not source.controls:
        return source
    kept = {name: index for name, index in source.specials.items() if name not in source.fallback_bytes}
    specials = {MARK + name if name in source.controls else name: index for name, index in kept.items()}
    data = _seal_data(source.kind, source.name, source.data, source.controls, source.fallback_bytes)
    return dataclasses.replace(source, data=data, specials=specials, controls=frozenset())


@functools.lru_cache(maxsize=2)
def _seal_data(kind: str, name: str, data: bytes, controls: frozenset[str], fallback_bytes: frozenset[str]) -> bytes:
    content = json.loads(data)

    def rename(token: str) -> str:
        return MARK + token if token in controls else token

    if kind == "tiktoken":
        content["specials"] = {rename(token): index for token, index in content["specials"].items()}
        return json.dumps(content).encode()
    model = content["model"]
    _check_merges(name, model.get("merges") or (), controls)
    added_tokens = [each for each in content["added_tokens"] if each["content"] not in fallback_bytes]
    content["added_tokens"] = [{**each, "content": rename(each["content"])} for each in added_tokens]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {rename(token): index for token, index in vocabulary.items()}
    else:
        model["vocab"] = [[rename(token), *score] for token, *score in vocabulary]
    if model.get("unk_token"):
        model["unk_token"] = rename(model["unk_token"])
    sealed = json.dumps(content)
    _check_characters(name, data.decode(), sealed, [token for token in controls if len(token) == 1])
    return sealed.encode()


def _check_merges(name: str, merges: Iterable[Any], controls: frozenset[str]) -> None:
    for merge in merges:
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        for token in (left + right, left, right):
            if token in controls:
                raise FormatError(
                    f"{name} merges ordinary text into its special token {token!r}, so they cannot be distinguished. "
                    f"Use special_tokens='allow' (--special-tokens allow), or a tokenizer without that merge."
                )


def _check_characters(name: str, open_json: str, sealed_json: str, characters: list[str]) -> None:
    """Refuse a character that only its special token spells: as text it would be unknown, or vanish."""
    if not characters:
        return
    load = import_text("tokenizers").Tokenizer.from_str
    own, sealed = load(open_json), load(sealed_json)
    own.encode_special_tokens = True
    model = json.loads(sealed_json)["model"]
    unknown = model.get("unk_id", sealed.token_to_id(model.get("unk_token") or ""))
    for character in characters:
        whole, spelled = (each.encode(character, add_special_tokens=False).ids for each in (own, sealed))
        if own.token_to_id(character) in whole and (unknown in spelled or len(spelled) < len(whole)):
            raise FormatError(
                f"{name} has the special token {character!r}, a character that its vocabulary cannot spell in another "
                "way, so texts would lose it. Use special_tokens='allow' (--special-tokens allow), or a tokenizer in "
                "which it is not special."
            )


@dataclass(frozen=True, slots=True)
class Guard:
    """What to do about special tokens of one tokenizer that a text spells out; picklable."""

    controls: frozenset[str]
    policy: Literal["text", "count", "refuse"]

    def check_documents(self, rows: Ragged, bad: BadRows) -> int:
        """Mark the documents that cannot be used; return how many special tokens the others spell out, if counted."""
        values, num_found = rows.values.data, 0
        if _may_hold_marks(rows):
            for place, found in _find_in_rows(_bytes_pattern(self.controls, True), values, rows):
                bad.add(
                    place, REASON, f"The text contains U+FDD2 before {found!r}, which means the special token itself."
                )
        if self.policy == "text":
            return 0
        for place, found in _find_in_rows(_bytes_pattern(self.controls, False), values, rows):
            if self.policy == "refuse":
                bad.add(place, REASON, f"The text contains the special token {found!r}.")
            num_found += place not in bad
        return num_found

    def find(self, value: Any) -> list[str]:
        """Special tokens in the strings of a message."""
        return [found for text in _strings(value) for found in _pattern(self.controls).findall(text)]

    def defuse(self, value: Any) -> Any:
        """A message with every special token broken, and partial ones that the surrounding text might complete."""
        if isinstance(value, str):
            return self._defuse(value)
        if isinstance(value, dict):
            return {self.defuse(key): self.defuse(each) for key, each in value.items()}
        return [self.defuse(each) for each in value] if isinstance(value, list) else value

    def _defuse(self, text: str) -> str:
        marked = _starts(self.controls).sub(rf"{MARK}\1{_BREAK}", text)
        begin, end = len(marked) - len(marked.lstrip()), len(marked.rstrip())
        if _endings(self.controls).search(marked, begin, end):
            marked = marked[:end] + _BREAK + marked[end:]
        return marked[:begin] + _BREAK + marked[begin:] if _beginnings(self.controls).match(marked, begin) else marked

    def seal(self, text: str) -> str:
        """A rendered conversation in the spelling of the sealed tokenizer."""
        return _seals(self.controls).sub(lambda found: "" if found[0] in (MARK, _BREAK) else MARK + found[0], text)


def has_mark(value: Any) -> bool:
    """Whether a string of a message contains a mark."""
    return any(MARK in text or _BREAK in text for text in _strings(value))


def strip_marks(text: str) -> str:
    """The text without marks."""
    return text.replace(MARK, "").replace(_BREAK, "")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _strings([*value, *value.values()])
    elif isinstance(value, list):
        for each in value:
            yield from _strings(each)


def _may_hold_marks(rows: Ragged) -> bool:
    """Whether the first two bytes of a mark occur at all: in most texts, a fifth of the price of a search."""
    first, second, *_ = MARK.encode()
    values = rows.values[int(rows.offsets[0]) : int(rows.offsets[-1])]
    return bool((values[np.flatnonzero(values[:-1] == first) + 1] == second).any())


def _find_in_rows(pattern: re.Pattern[bytes], values: memoryview, rows: Ragged) -> Iterator[tuple[int, str]]:
    """Places of rows, and what was found in them; a match across two rows does not count."""
    begin = int(rows.offsets[0])
    while found := pattern.search(values, begin):
        place = int(np.searchsorted(rows.offsets, found.start(), side="right")) - 1
        end = int(rows.offsets[place + 1])
        if found.end() <= end:
            yield place, found[0].decode().removeprefix(MARK)
        begin = found.end() if found.end() <= end else found.start() + 1


def _alternatives(controls: Iterable[str]) -> str:
    """One of the tokens, the longest that fits, as tokenizers choose."""
    return "|".join(map(re.escape, sorted(controls, key=lambda token: (-len(token), token))))


@functools.lru_cache(maxsize=8)
def _bytes_pattern(controls: frozenset[str], marked: bool) -> re.Pattern[bytes]:
    return re.compile(((MARK if marked else "") + f"(?:{_alternatives(controls)})").encode())


@functools.lru_cache(maxsize=4)
def _pattern(controls: frozenset[str]) -> re.Pattern[str]:
    return re.compile(_alternatives(controls))


@functools.lru_cache(maxsize=4)
def _starts(controls: frozenset[str]) -> re.Pattern[str]:
    """The first character of each token, even inside another one."""
    return re.compile(f"(?={_alternatives(controls)})(.)", re.DOTALL)


@functools.lru_cache(maxsize=4)
def _endings(controls: frozenset[str]) -> re.Pattern[str]:
    """The beginning of a token at the end of the text."""
    pieces = {token[:size] for token in controls for size in range(1, len(token))}
    return re.compile(f"(?:{_alternatives(pieces)})$" if pieces else "(?!)")


@functools.lru_cache(maxsize=4)
def _beginnings(controls: frozenset[str]) -> re.Pattern[str]:
    """The end of a token at the beginning of the text."""
    pieces = {token[size:] for token in controls for size in range(1, len(token))}
    return re.compile(_alternatives(pieces) or "(?!)")


@functools.lru_cache(maxsize=4)
def _seals(controls: frozenset[str]) -> re.Pattern[str]:
    """A mark, or a whole token; a token of a single character only if no mark precedes it."""
    long = [token for token in controls if len(token) > 1]
    short = [f"(?<!{MARK}){re.escape(token)}" for token in controls if len(token) == 1]
    return re.compile("|".join([f"[{MARK}{_BREAK}]", *([_alternatives(long)] if long else []), *short]))

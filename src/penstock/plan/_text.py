"""Plain data as TOML: the writing half of plan files.

The standard library reads TOML and does not write it. A plan file needs tables, arrays of tables, and values that
JSON knows; that is all there is here.

A batch as text with its borders: what a model reads, for people to look at.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.errors import StageError, counted, printable
from penstock.plan._accounts import DocumentTrace
from penstock.plan._stages import IGNORED

_OUR_KEYS = {"source", "mix", "stages"}


def write_toml(fields: Mapping[str, Any]) -> str:
    """TOML of `fields`: dicts become tables, lists of dicts arrays of tables, and all else values of their table."""
    return "\n".join(_table_lines(fields, "")) + "\n"


def _table_lines(fields: Mapping[str, Any], path: str) -> Iterator[str]:
    tables = {key: value for key, value in fields.items() if _is_table(value)}
    values = {key: value for key, value in fields.items() if key not in tables}
    if values:
        yield from [f"[{path}]"] if path else []
        yield from (f"{key} = {_value(value)}" for key, value in values.items())
        yield ""
    for key, table in tables.items():
        name = key if key in _OUR_KEYS else _value(key)  # names that people chose are quoted
        inner = f"{path}.{name}" if path else name
        if isinstance(table, Mapping):
            yield from _table_lines(table, inner)
        else:
            for item in table:
                yield from (f"[[{inner}]]", *(f"{key} = {_value(value)}" for key, value in item.items()), "")


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, list) and bool(value) and isinstance(value[0], Mapping))


def _value(value: Any) -> str:
    """TOML of one value. JSON is nearly that, except that TOML escapes DEL."""
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{_value(key)} = {_value(item)}' for key, item in value.items())} }}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


class Tokenizer(Protocol):
    """Anything that turns token ids into text: of tokenizers, transformers, tiktoken."""

    def decode(self, ids: list[int], /) -> str:
        """The text of some tokens."""
        ...


Decode = Callable[[list[int]], str]


def show_batch(batch: Mapping[str, Any], traces: Sequence[DocumentTrace], tokenizer: Tokenizer | Decode | None) -> str:
    """Row by row, document by document.

    Raises:
        StageError: the rows are not tokens.
    """
    if "input_ids" not in batch or "labels" not in batch:
        raise StageError("show() prints rows of tokens: window(), pack() or pad() makes them.")
    decode = _decoder(tokenizer)
    input_ids = batch["input_ids"]
    lines = [f"{counted(len(input_ids), 'row')} of {counted(input_ids.shape[1], 'place')}"]
    for row, ids in enumerate(input_ids):
        own = [trace for trace in traces if trace.row == row]
        left = _left_padding(batch, row)
        lines.append(f"row {row}")
        for trace in own:
            here = slice(left + trace.column, left + trace.column + trace.size)
            lines += _lines_of(trace, ids[here], batch["labels"][row, here], decode)
        if padding := input_ids.shape[1] - sum(trace.size for trace in own):
            lines.append(f"  ┆ {counted(padding, 'place')} of padding{' before it' if left else ''}")
    return "\n".join(lines)


def _decoder(tokenizer: Tokenizer | Decode | None) -> Decode:
    """What turns ids into text, control tokens included: `tokenizers` leaves them out unless told not to."""
    decode: Any = getattr(tokenizer, "decode", None) or tokenizer or _as_numbers
    try:
        can_skip = "skip_special_tokens" in inspect.signature(decode).parameters
    except ValueError:  # a function in C may not say what it takes
        can_skip = False
    chosen: Decode = functools.partial(decode, skip_special_tokens=False) if can_skip else decode
    return chosen


def _lines_of(trace: DocumentTrace, ids: NDArray[Any], labels: NDArray[Any], decode: Decode) -> Iterator[str]:
    source = f"{trace.source}: " if trace.source else ""
    part = f" from token {trace.start:,} on" if trace.start else ""
    origin = f", {printable(trace.origin)}" if trace.origin else ""
    targets = int(np.count_nonzero(labels != IGNORED))
    size = counted(trace.size, "token")
    yield f"  ├ {source}document {trace.document:,}{part}: {size}, {targets:,} predicted{origin}"
    for line in decode(ids.tolist()).split("\n"):
        yield f"  │ {printable(line)}"


def _left_padding(batch: Mapping[str, Any], row: int) -> int:
    mask = batch.get("attention_mask")
    return 0 if mask is None or not mask[row].any() else int(mask[row].argmax())


def _as_numbers(ids: list[int]) -> str:
    return " ".join(map(str, ids))

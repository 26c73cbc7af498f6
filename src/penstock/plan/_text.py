"""Plans and batches as text: stages for people, files and fingerprints, plan files, and a batch with its borders.

The standard library reads TOML and does not write it. A plan file needs tables, arrays of tables, and values that
JSON knows; that is all there is here.
"""

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.errors import StageError, counted, printable
from penstock.identity import function_identity, importable_name
from penstock.plan._accounts import DocumentTrace
from penstock.plan._stages import IGNORED, Batch, Cast, Map, Pack, SampleWeights, Stage, Weighted, with_groups

_DECIDING = {
    "sample": ("weights", "rows", "replacement"),
    "balance": ("column", "rows", "replacement"),
    "pad": ("column", "bucket", "run"),
    "shuffle": ("seed", "mode", "group"),
    "window": ("length", "column"),
    "pack": ("length", "long", "max_documents", "column"),
    "take": ("rows", "tokens"),
    "skip": ("rows",),
    "repeat": ("times",),
}
"""The settings that decide the order of rows; the others only decide what a row looks like."""


_BATCH_BEFORE = ("global_size", "tail")


def order_facts(stages: Sequence[Stage]) -> dict[str, str]:
    """The settings that decide which documents are row i of epoch e, stage by stage, short enough for a state."""
    facts: dict[str, str] = {}
    for stage in with_groups(stages):
        if stage.verb in _DECIDING:
            settings = dataclasses.asdict(stage)
            settings |= settings.pop("settings", {})
            names = (*_DECIDING[stage.verb], *(["lanes"] if settings.get("lanes", 1) > 1 else []))
            names += ("run_tokens",) if settings.get("run_tokens") else ()
            told = ", ".join(f"{name}={settings[name]!r}" for name in names)
            if isinstance(stage, Pack):
                budgets = {name: value for name, value in stage_arguments(stage).items() if name in ("cost", "limits")}
                told += "".join(f", {name}={value!r}" for name, value in budgets.items())
            facts[stage.verb] = f"{facts[stage.verb]}; {told}" if stage.verb in facts else told
    return facts


def stage_identity(stage: Stage) -> Any:
    """JSON of a stage's settings."""
    if isinstance(stage, Map):
        ragged = [sorted(stage.ragged)] if stage.ragged else []
        skips = ["skip"] if stage.on_error == "skip" else []
        return ["map", function_identity(stage.function), stage.batched, *ragged, *skips]
    settings = dataclasses.asdict(stage)
    if isinstance(stage, Pack):  # plans from before there were these keep their fingerprints
        for name in ("keep", "cost", "limits"):
            if not settings[name]:
                del settings[name]
        if not stage.limits:
            del settings["settings"]["limits"]
    if isinstance(stage, Batch):  # as above
        settings = {name: value for name, value in settings.items() if name in _BATCH_BEFORE or settings["tokens"]}
        settings |= {} if stage.balance is None else {"balance": stage.balance}
    if settings.get("run_tokens", 0) is None:
        del settings["run_tokens"]
    if settings.get("lanes") == 1:
        del settings["lanes"]
    if isinstance(stage, Weighted) and isinstance(stage.weights, SampleWeights):
        settings["weights"] = [stage.weights.identity]
    return [stage.verb, settings]


def describe_stage(stage: Stage) -> str:
    """A stage as it was written."""
    if isinstance(stage, Map):
        name = getattr(stage.function, "__qualname__", repr(stage.function))
        ragged = f", ragged={list(stage.ragged)!r}" if stage.ragged else ""
        skips = ", on_error='skip'" if stage.on_error == "skip" else ""
        return f"map({name}{', batched=True' if stage.batched else ''}{ragged}{skips})"
    if isinstance(stage, Cast):
        return f"cast({', '.join(f'{name}={dtype!r}' for name, dtype in stage.dtypes)})"
    return f"{stage.verb}({', '.join(f'{name}={value!r}' for name, value in stage_arguments(stage).items())})"


def stage_arguments(stage: Stage) -> dict[str, Any]:
    """Arguments of the verb that adds a stage, except those left at their default."""
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(stage):
        value = getattr(stage, field.name)
        if field.name == "settings":
            arguments |= {
                f.name: getattr(value, f.name) for f in dataclasses.fields(value) if getattr(value, f.name) != f.default
            }
        elif value != field.default:
            arguments[field.name] = dict(value) if field.name == "balance" and isinstance(value, tuple) else value
    if isinstance(stage, Pack) and stage.limits:
        arguments["limits"] = dict(zip(stage.limits, stage.settings.limits, strict=True))
    return arguments


def stage_json(stage: Stage) -> dict[str, Any]:
    """A stage in a plan file; `ValueError` for what a file cannot hold."""
    arguments: dict[str, Any] = {"dtypes": dict(stage.dtypes)} if isinstance(stage, Cast) else stage_arguments(stage)
    if isinstance(arguments.get("weights"), SampleWeights):
        raise ValueError("A plan over sample(weights=<an array>) holds a number per sample; make them a column first.")
    if isinstance(stage, Map):
        arguments["function"] = importable_name(stage.function)
    return {"verb": stage.verb, **arguments}


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

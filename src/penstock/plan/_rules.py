"""The one order in which stages make sense, and how they are written: for people, for files, for fingerprints.

A map cannot come before `pack`: what is packed is decided from the lengths in the index, and a map
would have to run on every document before the first row is known. Do it when the data is prepared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from penstock.errors import StageError
from penstock.identity import function_identity, importable_name
from penstock.plan._stages import (
    Cast,
    Map,
    Pack,
    Pad,
    Repeat,
    SampleWeights,
    Shuffle,
    Skip,
    Stage,
    TakeRows,
    Weighted,
    Window,
)

LEGAL_ORDER = (
    "select_columns, cast -> sample or balance -> shuffle -> window, pack or pad -> (mix) -> take, skip, repeat -> "
    "map, map, ... -> batch"
)
_REPEATABLE = (Cast, TakeRows, Skip, Repeat, Map)


def check_next(stages: Sequence[Stage], stage: Stage) -> None:
    """Refuse a stage that cannot follow those before it.

    Raises:
        StageError: out of order, or a second one of a kind that may be there only once.
    """
    last = stages[-1] if stages else None
    if last is not None and (
        stage.level < last.level or (stage.level == last.level and not isinstance(stage, _REPEATABLE))
    ):
        raise StageError(
            f"{stage.verb}() cannot follow {last.verb}(). The order is {LEGAL_ORDER}.{_advice(stage, last)}"
        )


# Measured by benchmarks/bench_mixing.py, in docs/plans.md. Storage windows of packed documents are larger, and all of a
# group is packed before its first row is known.
GROUP, PACKED_GROUP = 256, 16


def with_groups(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """The stages with the default group written out: 256 windows of 4 MiB, 16 of the larger ones that are packed.

    A full shuffle has no groups; its number is the one that its fingerprint has always had.
    """
    is_packed = any(isinstance(stage, Pack) for stage in stages)
    return tuple(
        dataclasses.replace(stage, group=PACKED_GROUP if is_packed or stage.mode == "full" else GROUP)
        if isinstance(stage, Shuffle) and stage.group is None
        else stage
        for stage in stages
    )


def without_groups(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """The stages with a group left out that is the default one: what `with_groups` wrote out, as a user writes it."""
    bare = tuple(dataclasses.replace(stage, group=None) if isinstance(stage, Shuffle) else stage for stage in stages)
    return bare if with_groups(bare) == with_groups(stages) else tuple(stages)


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


def order_facts(stages: Sequence[Stage]) -> dict[str, str]:
    """The settings that decide which documents are row i of epoch e, stage by stage, short enough for a state."""
    facts: dict[str, str] = {}
    for stage in with_groups(stages):
        if stage.verb in _DECIDING:
            settings = dataclasses.asdict(stage)
            settings |= settings.pop("settings", {})
            told = ", ".join(f"{name}={settings[name]!r}" for name in _DECIDING[stage.verb])
            facts[stage.verb] = f"{facts[stage.verb]}; {told}" if stage.verb in facts else told
    return facts


def stage_identity(stage: Stage) -> Any:
    """JSON of a stage's settings."""
    if isinstance(stage, Map):
        ragged = [sorted(stage.ragged)] if stage.ragged else []
        skips = ["skip"] if stage.on_error == "skip" else []
        return ["map", function_identity(stage.function), stage.batched, *ragged, *skips]
    settings = dataclasses.asdict(stage)
    if isinstance(stage, Pack) and not stage.keep:
        del settings["keep"]  # plans from before there was one keep their fingerprints
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
            arguments[field.name] = value
    return arguments


def stage_json(stage: Stage) -> dict[str, Any]:
    """A stage in a plan file; `ValueError` for what a file cannot hold."""
    arguments: dict[str, Any] = {"dtypes": dict(stage.dtypes)} if isinstance(stage, Cast) else stage_arguments(stage)
    if isinstance(arguments.get("weights"), SampleWeights):
        raise ValueError("A plan over sample(weights=<an array>) holds a number per sample; make them a column first.")
    if isinstance(stage, Map):
        arguments["function"] = importable_name(stage.function)
    return {"verb": stage.verb, **arguments}


def _advice(stage: Stage, last: Stage) -> str:
    if isinstance(stage, (Pack, Pad, Window)) and isinstance(last, Map):
        return " Lengths must come from the index: do what the map does when the data is prepared."
    return ""

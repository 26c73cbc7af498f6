"""Stages in words: for people, for fingerprints, and for plan files."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from penstock.identity import function_identity
from penstock.plan._dataset import Dataset
from penstock.plan._mix import Mix
from penstock.plan._stages import Cast, Map, Stage

_DECIDING = {
    "shuffle": ("seed", "mode", "group"),
    "window": ("length", "column"),
    "pack": ("length", "long", "max_documents", "column"),
}
"""The settings that decide the order of rows; the others only decide how a row looks."""


def stage_identity(stage: Stage) -> Any:
    """JSON of a stage's settings."""
    if isinstance(stage, Map):
        return ["map", function_identity(stage.function), stage.batched]
    return [stage.verb, dataclasses.asdict(stage)]


def describe_stage(stage: Stage) -> str:
    """A stage as it was written."""
    if isinstance(stage, Map):
        name = getattr(stage.function, "__qualname__", repr(stage.function))
        return f"map({name}{', batched=True' if stage.batched else ''})"
    if isinstance(stage, Cast):
        return f"cast({', '.join(f'{name}={dtype!r}' for name, dtype in stage.dtypes)})"
    return f"{stage.verb}({', '.join(f'{name}={value!r}' for name, value in stage_arguments(stage).items())})"


def describe_order(source: Dataset | Mix, stages: Sequence[Stage]) -> dict[str, str]:
    """What decides which documents are row i of epoch e, fact by fact, each short enough for a state."""
    if isinstance(source, Mix):
        shares = ", ".join(f"{name} {quota}/65536" for name, quota in source.quotas.items())
        parts = {f"source {name}": plan.order_fingerprint[:16] for name, plan, _ in source.sources}
        return {"mix": f"seed={source.seed}, epoch={source.epoch!r}, {shares}", **parts}
    facts = {"data": source.rows_fingerprint}
    for stage in stages:
        if stage.verb in _DECIDING:
            settings = dataclasses.asdict(stage)
            settings |= settings.pop("settings", {})
            facts[stage.verb] = ", ".join(f"{name}={settings[name]!r}" for name in _DECIDING[stage.verb])
    return facts


def stage_arguments(stage: Stage) -> dict[str, Any]:
    """Arguments of the method that makes a stage, those left at their default aside."""
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

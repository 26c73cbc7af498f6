"""From stages to the row source they describe."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import StageError
from penstock.order import derive_key
from penstock.plan._code_identity import identity_of
from penstock.plan._dataset import Dataset
from penstock.plan._mixture import MixedRows
from penstock.plan._pack_index import PackIndex, find_pack_index
from penstock.plan._packed import PackedRows
from penstock.plan._rows import RowSource, SampleRows, WindowRows
from penstock.plan._stages import LEGAL_ORDER, Batch, Cast, Map, Pack, Shuffle, Stage, Window

if TYPE_CHECKING:
    from penstock.plan._plan import Plan


@dataclass(frozen=True, slots=True)
class Mix:
    """Several plans, each with its share."""

    sources: tuple[tuple[str, Plan, float], ...]
    seed: int
    epoch: int | str
    """Rows in an epoch, or the source whose pass is one."""

    @classmethod
    def of(
        cls, sources: Mapping[str, tuple[Plan | Dataset, float]], *, seed: int, rows: int | None, epoch: str | None
    ) -> Mix:
        """A mixture from what `penstock.mix` was given."""
        if not sources:
            raise ValueError("mix() needs at least one source.")
        if (rows is None) == (epoch is None):
            raise ValueError("mix(): give rows=, the rows in an epoch, or epoch=, the source whose pass is one.")
        if epoch is not None and epoch not in sources:
            raise ValueError(f"mix(epoch={epoch!r}): the sources are {', '.join(map(repr, sources))}.")
        if rows is not None and (type(rows) is not int or not 1 <= rows <= 2**62):
            raise ValueError(f"mix(rows={rows!r}): an epoch has a whole number of rows, at least one.")
        if type(seed) is not int:
            raise TypeError(f"mix(seed={seed!r}): the seed must be an int.")
        parts = []
        for name, (stages, weight) in sources.items():
            plan = stages.as_plan() if isinstance(stages, Dataset) else stages
            _check_part(name, plan, weight)
            parts.append((name, plan, float(weight)))
        length: int | str = rows if rows is not None else str(epoch)
        mixture = cls(tuple(parts), seed, length)
        build_rows(mixture, ())  # weights and columns that do not fit are an error here
        return mixture

    @property
    def fingerprint(self) -> str:
        """Identity of the parts and how they are dealt."""
        parts = [[name, plan.fingerprint, weight] for name, plan, weight in self.sources]
        return hashlib.blake2b(json.dumps([parts, self.seed, self.epoch]).encode(), digest_size=16).hexdigest()

    def __repr__(self) -> str:
        rows = build_rows(self, ())
        assert isinstance(rows, MixedRows)
        lines = [f"mix(seed={self.seed}, {'rows' if isinstance(self.epoch, int) else 'epoch'}={self.epoch!r})"]
        for (name, plan, _), quota in zip(self.sources, rows.mixture.quotas, strict=True):
            inner = repr(plan).replace("\n", "\n    ")
            lines.append(f"  {name}: {quota}/65536 of {inner}")
        return "\n".join(lines)


def _check_part(name: str, plan: Plan, weight: float) -> None:
    if not 0 < weight < math.inf:
        raise ValueError(f"mix(): the weight of {name!r} is {weight!r}; weights are positive, finite numbers.")
    for stage in plan.stages:
        if isinstance(stage, (Map, Batch)):
            raise StageError(
                f"mix(): {name!r} ends with {stage.verb}(), which comes after mix. The order is {LEGAL_ORDER}."
            )


def build_rows(source: Dataset | Mix, stages: tuple[Stage, ...]) -> RowSource:
    """The row source that a plan reads from."""
    if isinstance(source, Mix):
        parts = {name: (plan.row_source, weight) for name, plan, weight in source.sources}
        return MixedRows(parts, seed=source.seed, epoch=source.epoch)
    casts = tuple(stage for stage in stages if isinstance(stage, Cast))
    shuffle = next((stage for stage in stages if isinstance(stage, Shuffle)), None)
    cut = next((stage for stage in stages if isinstance(stage, (Window, Pack))), None)
    if cut is None:
        return SampleRows(source, casts, shuffle)
    if casts:
        raise StageError(f"cast() has no effect before {cut.verb}(): its rows are int64 already. Leave it out.")
    if isinstance(cut, Window):
        return WindowRows(source, cut, shuffle)
    return PackedRows(source, cut, shuffle, _pack_index(source, cut))


def seed_of(source: Dataset | Mix, stages: tuple[Stage, ...]) -> int:
    """What the generators of mapped functions derive from."""
    if isinstance(source, Mix):
        return derive_key(source.seed, "mix")
    return next((stage.seed for stage in stages if isinstance(stage, Shuffle)), 0)


def stage_identity(stage: Stage) -> Any:
    """JSON of a stage's settings."""
    if isinstance(stage, Map):
        return ["map", identity_of(stage.function), stage.batched]
    return [stage.verb, dataclasses.asdict(stage)]


def describe_stage(stage: Stage) -> str:
    """A stage as it was written."""
    if isinstance(stage, Map):
        name = getattr(stage.function, "__qualname__", repr(stage.function))
        return f"map({name}{', batched=True' if stage.batched else ''})"
    if isinstance(stage, Cast):
        return f"cast({', '.join(f'{name}={dtype!r}' for name, dtype in stage.dtypes)})"
    return f"{stage.verb}({', '.join(f'{name}={value!r}' for name, value in stage_arguments(stage).items())})"


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


def _pack_index(dataset: Dataset, stage: Pack) -> PackIndex:
    column = dataset.schema[stage.column]
    if not column.is_ragged:
        return PackIndex.from_json({"window_starts": [0, len(dataset)], "window_rows": [0]}, len(dataset))
    return find_pack_index(
        lambda begin, end: dataset.lengths_between(column, begin, end),
        len(dataset),
        stage.settings,
        column=stage.column,
        fingerprint=dataset.rows_fingerprint,
        attributes=dataset.attributes if dataset.is_whole else {},
        cache=_cache_folder(),
    )


def _cache_folder() -> Path:
    import platformdirs

    return Path(platformdirs.user_cache_dir("penstock")) / "packing"

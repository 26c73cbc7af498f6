"""`penstock.mix`: several plans, each with its share.

A mixture takes the place of a dataset under a plan: it says which sources there are and what they weigh, checks that
their tokens and labels mean the same, and describes itself in files and states. Which source row i comes from is
arithmetic on weights rounded to 1/65,536 (`rows`).
"""

import json
import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, NoReturn

from penstock.dataset import check_classes
from penstock.errors import StageError, check_choice, whole_number
from penstock.identity import digest
from penstock.order import derive_key
from penstock.plan._dataset import Dataset
from penstock.plan._mixed_rows import Deal, MixedRows
from penstock.plan._plan import Plan
from penstock.plan._stages import LEGAL_ORDER, Batch, Map, Stage, Stages, TakeRows, num_lanes
from penstock.plan._text import order_facts

Sources = Mapping[str, Plan | Dataset | tuple[Plan | Dataset, float]]
Schedule = Mapping[int | float, Mapping[str, float]]
Parts = tuple[tuple[str, Plan, float], ...]
"""(name, plan, weight) of each source."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Several plans, each with its share."""

    sources: Parts
    seed: int
    epoch: int | str
    """Rows in an epoch, or the source whose pass is one."""
    different_tokenizers: bool = False
    """Whether the sources may hold tokens of different tokenizers."""
    temperature: float = 1.0
    """Weights are raised to 1 / temperature: the higher, the more alike they are."""
    schedule: tuple[tuple[int, tuple[float, ...]], ...] = ()
    """(row, weights from there on)"""
    source_ids: bool = False
    """Whether a batch says which source each row is from."""

    @property
    def tokenizers(self) -> dict[str, str]:
        return {key: name for _, plan, _ in self.sources for key, name in plan.source.tokenizers.items()}

    @property
    def classes(self) -> tuple[str, ...]:
        """Those of the first source that has any; all that have them have the same."""
        return next((plan.source.classes for _, plan, _ in self.sources if plan.source.classes), ())

    @property
    def folders(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(folder for _, plan, _ in self.sources for folder in plan.source.folders))

    def check_tokenizers(self) -> None:
        """Refuse sources whose token ids mean different things, unless that was asked for."""
        if self.different_tokenizers or len(self.tokenizers) < 2:
            return
        made = ", ".join(
            f"{part!r} with {name} ({key[:8]})"
            for part, plan, _ in self.sources
            for key, name in plan.source.tokenizers.items()
        )
        raise ValueError(
            f"mix(): the sources were made with different tokenizers, so one token id means different things: {made}. "
            "Prepare them with one tokenizer, or pass different_tokenizers=True if that is what you want."
        )

    def build_rows(self, stages: Stages = ()) -> MixedRows:
        """What the mixture reads from; the stages that may follow change no row."""
        deal = Deal(
            weights=self._tempered(tuple(weight for _, _, weight in self.sources)),
            seed=self.seed,
            epoch=self.epoch,
            changes=tuple((row, self._tempered(weights)) for row, weights in self.schedule),
            source_ids=self.source_ids,
        )
        return MixedRows({name: plan.row_source for name, plan, _ in self.sources}, deal)

    def _tempered(self, weights: tuple[float, ...]) -> tuple[float, ...]:
        if self.temperature == 1:
            return weights
        found = tuple((weight / max(weights)) ** (1 / self.temperature) if weight else 0.0 for weight in weights)
        for (name, _, _), weight, tempered in zip(self.sources, weights, found, strict=True):
            if weight and not tempered:
                raise ValueError(f"mix(temperature={self.temperature!r}): it leaves nothing of the weight of {name!r}.")
        return found

    def check_stage(self, stage: Stage) -> None:
        """Only take(), skip(), repeat(), map() and batch() can follow."""
        if stage.level < TakeRows.level:
            raise StageError(f"{stage.verb}() cannot follow mix(). The order is {LEGAL_ORDER}.")

    def select_columns(self, names: Iterable[str]) -> NoReturn:
        raise StageError(f"select_columns() cannot follow mix(). The order is {LEGAL_ORDER}.")

    def map_seed(self, stages: Stages) -> int:
        return derive_key(self.seed, "mix")

    def order_facts(self, stages: Stages) -> dict[str, str]:
        shares = "; ".join(f"{_from_row(row)}{_describe_quotas(quotas)}" for row, quotas in self.quotas.items())
        parts = {f"source {name}": plan.order_fingerprint[:16] for name, plan, _ in self.sources}
        return {"mix": f"seed={self.seed}, epoch={self.epoch!r}, {shares}", **parts, **order_facts(stages)}

    def to_json(self) -> dict[str, Any]:
        parts = {name: {"weight": weight, **plan.to_json()} for name, plan, weight in self.sources}
        length = {"rows" if isinstance(self.epoch, int) else "epoch": self.epoch}
        names = [name for name, _, _ in self.sources]
        changes = {str(row): dict(zip(names, weights, strict=True)) for row, weights in self.schedule}
        more = {"different_tokenizers": self.different_tokenizers, "source_ids": self.source_ids, "schedule": changes}
        more |= {"temperature": self.temperature} if self.temperature != 1 else {}
        return {"seed": self.seed, **length, **{name: value for name, value in more.items() if value}, "mix": parts}

    @property
    def quotas(self) -> dict[int, dict[str, int]]:
        """Rows of each source in every 65,536, by the row from which on that holds."""
        names = [name for name, _, _ in self.sources]
        return {row: dict(zip(names, found, strict=True)) for row, found in self.build_rows().schedule.items()}

    @property
    def fingerprint(self) -> str:
        parts = [[name, plan.fingerprint, weight] for name, plan, weight in self.sources]
        added = {"temperature": self.temperature, "schedule": self.schedule, "source_ids": self.source_ids}
        used = [added] if self.temperature != 1 or self.schedule or self.source_ids else []
        return digest(json.dumps([parts, self.seed, self.epoch, *used]))

    def __repr__(self) -> str:
        length = f"{'rows' if isinstance(self.epoch, int) else 'epoch'}={self.epoch!r}"
        tempered = f", temperature={self.temperature!r}" if self.temperature != 1 else ""
        with_ids = ", source_ids=True" if self.source_ids else ""
        lines = [f"mix(seed={self.seed}, {length}{tempered}{with_ids})"]
        first, *changes = self.quotas.items()
        for name, plan, _ in self.sources:
            inner = repr(plan).replace("\n", "\n    ")
            lines.append(f"  {name}: {first[1][name]}/65536 of {inner}")
        return "\n".join([*lines, *(f"  {_from_row(row)}{_describe_quotas(shares)}" for row, shares in changes)])


def mix(
    sources: Sources,
    *,
    seed: int,
    rows: int | None = None,
    epoch: str | None = None,
    temperature: float = 1.0,
    schedule: Schedule | None = None,
    schedule_in: Literal["rows", "tokens"] = "rows",
    source_ids: bool = False,
    different_tokenizers: bool = False,
) -> Plan:
    """Rows of several plans in fixed shares, or in shares that change at given rows.

    Args:
        sources: `{name: (stages, weight)}`; the stages end with shuffle, window, pack or pad. Weights are any
            positive numbers; they are rounded to 1/65,536. Stages alone weigh as much as they have rows.
        seed: Decides which source comes next.
        rows: Rows in an epoch of the mixture.
        epoch: Instead of `rows`, the name of a source: the first epoch ends when it has been read once, with changes of
            weights counted in, and the others have as many rows.
        temperature: Weights are raised to 1 / temperature: above 1 the small sources gain, below 1 the large ones.
        schedule: `{row: {name: weight}}`: other weights from a row of the run on, rounded up to a multiple of 32. A
            source that is not named gives nothing from there on. States from before a change still fit when it is
            added.
        schedule_in: "tokens" if the numbers of the schedule are tokens; rows must then have a fixed number of them.
        source_ids: Say in `batch["source_ids"]` which source each row is from, numbered as in `sources`.
        different_tokenizers: Accept sources whose token ids mean different things, which are refused otherwise.

    >>> import numpy as np, penstock
    >>> a, b = (penstock.from_arrays({"x": np.full(100, value)}) for value in (0, 1))
    >>> plan = mix({"a": (a.shuffle(seed=1), 0.75), "b": (b.shuffle(seed=1), 0.25)}, seed=7, rows=1000).batch(96)
    >>> int(plan.read(0)["x"].sum())
    24
    """
    if not isinstance(sources, Mapping):
        raise TypeError(f"mix(): the sources are {{name: (stages, weight)}}, not {type(sources).__name__}.")
    if not sources:
        raise ValueError("mix() needs at least one source.")
    if (rows is None) == (epoch is None):
        raise ValueError("mix(): give rows=, the rows in an epoch, or epoch=, the source whose pass is one.")
    if epoch is not None and epoch not in sources:
        raise ValueError(f"mix(epoch={epoch!r}): the sources are {', '.join(map(repr, sources))}.")
    if not _is_number(temperature) or not 0 < temperature < math.inf:
        raise ValueError(f"mix(temperature={temperature!r}): a positive, finite number is needed.")
    parts = tuple(_checked_part(name, source) for name, source in sources.items())
    mixture = Mix(
        sources=parts,
        seed=whole_number("mix", "seed", seed),
        epoch=epoch if epoch is not None else whole_number("mix", "rows", rows, at_least=1, at_most=2**62),
        different_tokenizers=different_tokenizers,
        temperature=temperature,
        schedule=_checked_schedule(schedule or {}, parts, _schedule_unit(parts, schedule_in)),
        source_ids=source_ids,
    )
    mixture.check_tokenizers()
    check_classes("mix", (plan.source.classes for _, plan, _ in parts))
    mixture.build_rows()  # weights and columns that do not fit are an error here
    return Plan(mixture)


def _from_row(row: int) -> str:
    return f"from row {row:,} on: " if row else ""


def _describe_quotas(quotas: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {quota}/65536" for name, quota in quotas.items())


def _is_number(value: object) -> bool:
    """Whether a caller's value can be compared with numbers."""
    return isinstance(value, Real)


def _schedule_unit(parts: Parts, unit: str) -> int:
    """How many of the schedule's units a row is."""
    check_choice("schedule_in", unit, ("rows", "tokens"), verb="mix")
    if unit == "rows":
        return 1
    length = parts[0][1].row_source.row_length
    if length is None:
        raise StageError("mix(schedule_in='tokens') needs rows of a fixed number of tokens: window() or pack().")
    return length


def _checked_schedule(schedule: Schedule, parts: Parts, unit: int) -> tuple[tuple[int, tuple[float, ...]], ...]:
    """(row, weights of all sources from there on), in order.

    Raises:
        TypeError: it is not a mapping from whole numbers.
        ValueError: a number, a name or a weight is invalid.
    """
    if not isinstance(schedule, Mapping):
        raise TypeError(f"mix(schedule=...): {{row: {{name: weight}}}} is needed, not {type(schedule).__name__}.")
    names = [name for name, _, _ in parts]
    changes = []
    for at, weights in sorted(((_place(at), weights) for at, weights in schedule.items()), key=operator.itemgetter(0)):
        if not isinstance(weights, Mapping) or (wrong := set(weights) - set(names)):
            found = ", ".join(map(repr, wrong)) if isinstance(weights, Mapping) else repr(weights)
            expected = ", ".join(map(repr, names))
            raise ValueError(f"mix(schedule={{{at}: ...}}): {found}; expected weights of {expected}.")
        for name, weight in weights.items():
            if not _is_number(weight) or not 0 <= weight < math.inf:
                raise ValueError(f"mix(): from {at} on {name!r} weighs {weight!r}; weights are finite, and at least 0.")
        if not any(weights.values()):
            raise ValueError(f"mix(): from {at} on no source has a weight.")
        changes.append((max(1, at // unit), tuple(float(weights.get(name, 0.0)) for name in names)))
    return tuple(changes)


def _place(at: object) -> int:
    """A row or a token of a schedule, which may be written as 1e12."""
    whole = int(at) if isinstance(at, float) and at.is_integer() else at
    return whole_number("mix", "row or token of a schedule", whole, at_least=1, at_most=2**60)


def _checked_part(name: object, source: object) -> tuple[str, Plan, float]:
    """(name, plan, weight) of a source."""
    if not isinstance(name, str):
        raise TypeError(f"mix(): {name!r} cannot name a source; names are text.")
    if isinstance(source, Dataset | Plan):
        source = (source, float(source.as_plan().num_rows) or 1.0)
    if not isinstance(source, tuple | list) or len(source) != 2:
        raise TypeError(f"mix(): {name!r} must be (stages, weight), as in (ds.shuffle(seed=1).pack(4096), 0.7).")
    stages, weight = source
    if not isinstance(stages, Dataset | Plan):
        raise TypeError(f"mix(): {name!r} is {type(stages).__name__}; a source is a Penstock dataset or plan.")
    if not _is_number(weight) or not 0 < weight < math.inf:
        raise ValueError(f"mix(): the weight of {name!r} is {weight!r}; weights are positive, finite numbers.")
    plan = stages.as_plan()
    if num_lanes(plan.stages) > 1:
        raise StageError(
            f"mix(): {name!r} is shuffled with lanes=..., and a mixture deals its rows to all ranks: each would need "
            "all of it. Leave lanes= out."
        )
    for stage in plan.stages:
        if isinstance(stage, (Map, Batch)):
            raise StageError(
                f"mix(): {name!r} ends with {stage.verb}(), which comes after mix. The order is {LEGAL_ORDER}."
            )
    return name, plan, float(weight)

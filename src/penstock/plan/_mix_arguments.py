"""What `penstock.mix` may be given, checked and made plain."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from numbers import Real

from penstock.errors import StageError, whole_number
from penstock.plan._dataset import Dataset
from penstock.plan._plan import Plan
from penstock.stages import LEGAL_ORDER, Batch, Map

Sources = Mapping[str, Plan | Dataset | tuple[Plan | Dataset, float]]
Schedule = Mapping[int | float, Mapping[str, float]]
Parts = tuple[tuple[str, Plan, float], ...]


def is_number(value: object) -> bool:
    """Whether it can be compared with numbers."""
    return isinstance(value, Real)


def schedule_unit(parts: Parts, unit: str) -> int:
    """How many of the schedule's units a row is."""
    if unit == "rows":
        return 1
    if unit != "tokens":
        raise ValueError(f"mix(schedule_in={unit!r}): the choices are 'rows' and 'tokens'.")
    length = parts[0][1].row_source.row_length
    if length is None:
        raise StageError("mix(schedule_in='tokens') needs rows of a fixed number of tokens: window() or pack().")
    return length


def checked_schedule(schedule: Schedule, parts: Parts, unit: int) -> tuple[tuple[int, tuple[float, ...]], ...]:
    """(row, weights of all sources from there on), in order.

    Raises:
        TypeError: it is no mapping from whole numbers.
        ValueError: a number, a name or a weight that makes no sense.
    """
    if not isinstance(schedule, Mapping):
        raise TypeError(f"mix(schedule=...): {{row: {{name: weight}}}} is needed, not {type(schedule).__name__}.")
    names = [name for name, _, _ in parts]
    changes = []
    for at, weights in sorted(((_place(at), weights) for at, weights in schedule.items()), key=operator.itemgetter(0)):
        if not isinstance(weights, Mapping) or (wrong := set(weights) - set(names)):
            told = ", ".join(map(repr, wrong)) if isinstance(weights, Mapping) else repr(weights)
            raise ValueError(f"mix(schedule={{{at}: ...}}): {told}; expected weights of {', '.join(map(repr, names))}.")
        for name, weight in weights.items():
            if not is_number(weight) or not 0 <= weight < math.inf:
                raise ValueError(f"mix(): from {at} on {name!r} weighs {weight!r}; weights are finite, and at least 0.")
        if not any(weights.values()):
            raise ValueError(f"mix(): from {at} on no source has a weight.")
        changes.append((max(1, at // unit), tuple(float(weights.get(name, 0.0)) for name in names)))
    return tuple(changes)


def _place(at: object) -> int:
    """A row or a token of a schedule; 1e12 is how people write it."""
    whole = int(at) if isinstance(at, float) and at.is_integer() else at
    return whole_number("mix", "row or token of a schedule", whole, at_least=1, at_most=2**60)


def checked_part(name: object, source: object) -> tuple[str, Plan, float]:
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
    if not is_number(weight) or not 0 < weight < math.inf:
        raise ValueError(f"mix(): the weight of {name!r} is {weight!r}; weights are positive, finite numbers.")
    plan = stages.as_plan()
    for stage in plan.stages:
        if isinstance(stage, (Map, Batch)):
            raise StageError(
                f"mix(): {name!r} ends with {stage.verb}(), which comes after mix. The order is {LEGAL_ORDER}."
            )
    return name, plan, float(weight)

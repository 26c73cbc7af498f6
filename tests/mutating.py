"""Plain data as a stranger might have changed it: one or two places of it hold something else."""

from __future__ import annotations

import copy
import random
from typing import Any

NASTY: list[Any] = [
    None,
    True,
    0,
    -1,
    1,
    625,
    2**31,
    2**62,
    2**70,
    1.5,
    1e308,
    "",
    "x",
    "0" * 32,
    "\x1b[2J\n",
    "../../outside",
    "/**/*.jsonl",
    "http://127.0.0.1:9/a.jsonl",
    "reference://::data:application/json;base64,e30=",
    "s3://bucket/a.jsonl",
    "x" * 100_000,
    [],
    {},
    [[]],
    [None],
    {"a": 1},
    ["x", "y", "z", "u", "v", "w"],
    [-1] * 6,
    [2**40] * 5,
]


def mutate(value: Any, generator: random.Random, more: list[Any] | None = None) -> Any:
    """A changed copy; `more` are values to put in besides the usual ones."""
    changed = copy.deepcopy(value)
    for _ in range(generator.choice((1, 1, 1, 2))):
        changed = _change(changed, generator, [*NASTY, *(more or [])])
    return changed


def _change(value: Any, generator: random.Random, values: list[Any]) -> Any:
    """Go down to a random place, a third of the time no deeper, and change what is there."""
    if not isinstance(value, dict | list) or not value or generator.random() < 0.15:
        return copy.deepcopy(generator.choice(values))
    keys = list(value) if isinstance(value, dict) else range(len(value))
    key = generator.choice(keys)
    match generator.randrange(12):
        case 0:
            del value[key]
        case 1 if isinstance(value, list):
            value.append(value[key])
        case 1:
            value["unknown"] = value[key]
        case 2:
            value[key] = [value[key]]
        case _:
            value[key] = _change(value[key], generator, values)
    return value

"""What decides the bytes of a prepared dataset, and in what two of them differ.

A recipe is kept in the manifest and beside unfinished work. Work is used again only under the same
recipe, so a changed tokenizer can never end up in one dataset with the old one. Workers, engine, time
and host are not in it: they decide nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from penstock.identity import digest_json
from penstock.schema import Schema

RECIPE_VERSION = 1
_WORDS = {
    "version": "version of the preparation",
    "transform": "transform",
    "columns": "columns",
    "reading": "way to read the sources",
    "shard_bytes": "shard_bytes",
    "shuffle": "shuffle",
    "origins": "place of the origins",
}
_SHOWN = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything but the source files that decides the output."""

    transform: Mapping[str, Any]
    """Identity of the transform."""
    columns: Mapping[str, str]
    """Columns of the dataset, the origin among them where it is one."""
    reading: Mapping[str, Any]
    """Identity of the options sources are read with."""
    shard_bytes: int
    task_bytes: int
    """Raw bytes a task takes. It is chosen once, from the size of the first sources, and then kept."""
    shuffle: int | None
    origins: Literal["manifest", "column"]
    version: int = RECIPE_VERSION

    @property
    def schema(self) -> Schema:
        """Schema of the dataset."""
        return Schema.parse(self.columns)

    @property
    def key(self) -> str:
        """Short name that differs whenever the recipe does."""
        return digest_json(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Plain data, as it comes back from a file."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """What `to_json` gave."""
        return cls(**fields)


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """In words, in what a recipe that was found differs from the one wanted; `task_bytes` never matters."""
    told: list[str] = []
    for field, words in _WORDS.items():
        if field in wanted and found.get(field) != wanted[field]:
            told.append(_describe(words, found.get(field), wanted[field]))
    return told


def _describe(words: str, found: Any, wanted: Any) -> str:
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        changed = [key for key in {**found, **wanted} if found.get(key) != wanted.get(key)]
        details = (f"{key} was {_shorten(found.get(key))}, is {_shorten(wanted.get(key))}" for key in changed)
        return f"{words} ({'; '.join(details)})"
    return f"{words} (was {_shorten(found)}, is {_shorten(wanted)})"


def _shorten(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"

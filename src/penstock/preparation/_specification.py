"""What decides the bytes of a prepared dataset, and how two specifications differ.

The specification is stored in the manifest, and beside the tasks of an unfinished run. A task's result is only
reused under the same specification, so the output of two tokenizers can never end up in one dataset. Workers,
engine, time and host are not part of it: they decide nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from penstock.identity import digest_json
from penstock.preparation._parts import SHAPE as PART
from penstock.preparation._parts import Part
from penstock.preparation._settings import Settings
from penstock.schema import Schema
from penstock.shapes import Either, find_mismatch
from penstock.sources import FORMATS, SourceOptions
from penstock.transforms import Transform

VERSION = 1
_WORDS = {
    "version": "version of the preparation",
    "transform": "transform",
    "columns": "columns",
    "reading": "reading",
    "shard_bytes": "shard_bytes",
    "shuffle": "shuffle",
    "file_order": "order of files",
    "origins": "origins",
    "part": "split",
    "limit": "limit",
}
_SHOWN = 80
_UNWRITTEN = {"special_tokens": '"allow", which turns special tokens in a text into control tokens'}
"""What a transform does if the field is missing: what older versions did."""
_SIZE = range(1, 1 << 48)
_SHAPE = {
    "transform": {str: object},
    "columns": {str: str},
    "reading": {"format": Either(None, frozenset(FORMATS))},
    "shard_bytes": _SIZE,
    "task_bytes": _SIZE,
    "shuffle": Either(None, int),
    "origins": frozenset({"manifest", "column"}),
    "version": int,
}
_LATER = {"hashes": bool, "file_order": frozenset({"hash"}), "part": PART, "limit": _SIZE}
"""Fields that older versions did not have; defaults are not written, so that datasets of those versions can be
continued."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Specification:
    """Everything except the source files that decides the output. On disk it is called a recipe."""

    transform: Mapping[str, Any]
    """Identity of the transform."""
    columns: Mapping[str, str]
    """Columns of the dataset that people see, including the origin if it is one."""
    reading: Mapping[str, Any]
    """Identity of the options for reading the sources."""
    shard_bytes: int
    task_bytes: int
    """Raw bytes per task; chosen once, from the size of the first sources, and then kept."""
    shuffle: int | None
    origins: Literal["manifest", "column"]
    hashes: bool = False
    """Whether a hash of each sample is stored; older datasets without hashes are continued without them."""
    file_order: Literal["hash"] | None = None
    """"hash" reads files in the order of a hash of their names, which mixes class folders; None, by name."""
    part: Mapping[str, Any] | None = None
    """Which part of a split is stored; None stores all samples."""
    limit: int | None = None
    """For a trial, how many samples to make; None makes all of them."""
    version: int = VERSION

    @property
    def schema(self) -> Schema:
        """Schema of the dataset."""
        schema = Schema.parse(self.columns)
        return schema.with_hashes() if self.hashes else schema

    @property
    def key(self) -> str:
        """Short name that changes whenever the specification does."""
        return digest_json(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Plain data, exactly as it comes back from a file."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return {name: value for name, value in plain.items() if name not in _LATER or value}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`; `ValueError` on anything else. Fields of newer versions are ignored."""
        if wrong := find_mismatch(fields, _SHAPE, "recipe"):
            raise ValueError(wrong)
        later = {field: fields[field] for field in _LATER if field in fields}
        if wrong := find_mismatch(later, {field: _LATER[field] for field in later}, "recipe"):
            raise ValueError(wrong)
        return cls(**{field: fields[field] for field in _SHAPE}, **later)


def requested_fields(
    transform: Transform, reading: SourceOptions, settings: Settings, part: Part | None
) -> dict[str, Any]:
    """The fields of a specification that the arguments determine, before any row has been read."""
    origins = {} if settings.origins == "auto" else {"origins": settings.origins}
    # With "auto", an existing dataset keeps what it has.
    order = {} if settings.shuffle == "auto" else {"shuffle": settings.shuffle, "file_order": None}
    return {
        "version": VERSION,
        "transform": transform.identity,
        "reading": reading.identity,
        "shard_bytes": settings.shard_bytes,
        "part": None if part is None else part.to_json(),
        "limit": settings.limit,
        **order,
        **origins,
    }


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """How the specification found differs from what is wanted, in words; `task_bytes` never matters."""
    return [
        _describe(words, found.get(field), wanted[field])
        for field, words in _WORDS.items()
        if field in wanted and found.get(field) != wanted[field]
    ]


def _describe(words: str, found: Any, wanted: Any) -> str:
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        changed = [key for key in {**found, **wanted} if found.get(key) != wanted.get(key)]
        details = (f"{key} was {_value(found, key)}, is now {_value(wanted, key)}" for key in changed)
        return f"{words} ({'; '.join(details)})"
    return f"{words} (was {_shorten(found)}, is now {_shorten(wanted)})"


def _value(fields: Mapping[str, Any], key: str) -> str:
    return _UNWRITTEN[key] if key in _UNWRITTEN and key not in fields else _shorten(fields.get(key))


def _shorten(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"

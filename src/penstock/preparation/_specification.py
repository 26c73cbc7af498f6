"""What a caller of `prepare` may choose, and what of it decides the bytes of the dataset.

`Settings` are checked once. Of them, only `shard_bytes`, `shuffle`, `limit` and `origins` affect the bytes of the
output, and `pack` what is stored beside it. Workers and engine decide how long it takes; the rest, what happens when
something is wrong.

The `Specification` is everything but the source files that decides the bytes, and how two of them differ. It is stored
in the manifest, and beside the tasks of an unfinished run. A task's result is only reused under the same specification,
so the output of two tokenizers can never end up in one dataset.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Literal, Self, get_args

from penstock.errors import check_choice
from penstock.identity import digest_json
from penstock.machine import usable_cpus
from penstock.preparation._parts import SHAPE as PART
from penstock.preparation._parts import Part
from penstock.schema import Schema
from penstock.shapes import Either, find_mismatch
from penstock.sources import FORMATS, SourceOptions
from penstock.transforms import Transform

EngineName = Literal["local", "ray"]
OnError = Literal["raise", "skip"]
Origins = Literal["auto", "manifest", "column"]

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
_DIGEST, _DIGEST_DIGITS = re.compile("[0-9a-f]{32,}"), 12
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
class Settings:
    """How a preparation runs; `prepare` says what each setting means.

    Raises:
        ValueError: a choice that does not exist, or a number out of range.
    """

    workers: int | Literal["auto"]
    engine: EngineName
    address: str | None
    shard_bytes: int
    shuffle: int | Literal["auto"] | None
    pack: tuple[int, ...]
    on_error: OnError
    max_skipped: int | float | None
    overwrite: bool
    remove: bool
    append: bool
    limit: int | None
    origins: Origins

    def __post_init__(self) -> None:
        check_choice("engine", self.engine, get_args(EngineName))
        check_choice("on_error", self.on_error, get_args(OnError))
        check_choice("origins", self.origins, get_args(Origins))
        if self.workers != "auto" and (type(self.workers) is not int or self.workers < 1):
            raise ValueError(f"workers={self.workers!r}; give a number of processes, or 'auto'.")
        if self.shard_bytes < 1:
            raise ValueError(f"shard_bytes={self.shard_bytes}; it must be at least 1.")
        self._check_max_skipped()
        if self.limit is not None and (type(self.limit) is not int or self.limit < 1):
            raise ValueError(f"limit={self.limit!r}; give a number of samples, at least 1, or None for all of them.")
        if self.append and (self.overwrite or self.remove):
            raise ValueError("append=True keeps every existing sample; it does not go with overwrite= or remove=.")
        if self.address is not None and self.engine != "ray":
            raise ValueError(f"address={self.address!r} is the address of a Ray cluster; it needs engine='ray'.")
        if any(type(length) is not int or length < 1 for length in self.pack):
            raise ValueError(f"pack={list(self.pack)}; row lengths must be numbers of tokens, at least 1.")
        if self.shuffle not in (None, "auto") and type(self.shuffle) is not int:
            raise ValueError(f"shuffle={self.shuffle!r}; give an integer seed, 'auto', or None.")
        if self.origins == "manifest" and type(self.shuffle) is int:
            raise ValueError("shuffle= moves every sample, so their origins must be a column; leave origins= out.")

    def _check_max_skipped(self) -> None:
        limit = self.max_skipped
        if limit is None:
            return
        if limit < 0 or (isinstance(limit, float) and not limit <= 1) or self.on_error != "skip":
            raise ValueError(
                f"max_skipped={limit} with on_error={self.on_error!r}; give a number of rows, or a share from 0.0 to "
                "1.0, with on_error='skip'."
            )

    @property
    def most_skipped_rows(self) -> int | None:
        """Rows after which to stop at once; None if the limit is a share, which is known only after the whole run."""
        return self.max_skipped if isinstance(self.max_skipped, int) else None

    @property
    def num_workers(self) -> int:
        """Workers as a number."""
        return usable_cpus() if self.workers == "auto" else self.workers


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


def differences(
    found: Mapping[str, Any], wanted: Mapping[str, Any], names: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """How the specification found differs from what is wanted, in words; `task_bytes` never matters.

    `names` are those of tokenizers, by digest: a specification has only the digest, which tells nobody anything.
    """
    return [
        _describe(words, found.get(field), wanted[field], names)
        for field, words in _WORDS.items()
        if field in wanted and found.get(field) != wanted[field]
    ]


def _describe(words: str, found: Any, wanted: Any, names: Mapping[str, str]) -> str:
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        changed = [key for key in {**found, **wanted} if found.get(key) != wanted.get(key)]
        details = (f"{key} was {_value(found, key, names)}, is now {_value(wanted, key, names)}" for key in changed)
        return f"{words} ({'; '.join(details)})"
    return f"{words} (was {_shorten(found)}, is now {_shorten(wanted)})"


def _value(fields: Mapping[str, Any], key: str, names: Mapping[str, str]) -> str:
    value = fields.get(key)
    if key in _UNWRITTEN and key not in fields:
        return _UNWRITTEN[key]
    if isinstance(value, str) and value in names:
        return f"{names[value]} ({value[:_DIGEST_DIGITS]}…)"
    return _shorten(value)


def _shorten(value: Any) -> str:
    if isinstance(value, str) and _DIGEST.fullmatch(value):
        return f"{value[:_DIGEST_DIGITS]}…"
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"

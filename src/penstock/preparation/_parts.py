"""The parts of a split, each written as its own dataset: which samples belong to which.

    destination/train    every sample whose number, drawn by its key and the seed, is below 0.98
    destination/val      the others

A part is prepared like any other dataset, from the same sources, and leaves out the samples of the other parts. Keys
are those of `Dataset.split`, so the parts hold what splitting the whole dataset would give; and they depend only on the
sample, so a sample never changes its part, whatever is added, removed or reordered later.

Bad rows have no key. They are counted in the largest part, which is also prepared first.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from penstock.errors import DatasetExists, PenstockError, SchemaError
from penstock.order import draw_shares, share_ranges
from penstock.schema import Ragged, Schema
from penstock.shapes import Either, find_mismatch
from penstock.shards import content_columns, hash_samples, hash_texts, read_manifest

Batch = Mapping[str, Ragged | NDArray[Any]]
REST = "train"
"""The part that takes what the given fractions leave."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
SHAPE = {"name": str, "parts": [(str, float)], "seed": int, "by": Either(str, [str])}
"""A part in a recipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a split."""

    name: str
    parts: tuple[tuple[str, float], ...]
    """Name and share of all parts, in order."""
    seed: int
    by: str | tuple[str, ...]
    """"content", "file", or columns: what decides where a sample goes."""

    @property
    def is_largest(self) -> bool:
        """Whether this is the largest part (the first, if there are several), in which bad rows are counted."""
        return self.name == max(self.parts, key=lambda part: part[1])[0]

    def select(self, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Indices of those of a batch's samples that are in this part."""
        begin, end = share_ranges(dict(self.parts))[self.name]
        shares = draw_shares(keys, self.seed)
        return np.flatnonzero((shares >= begin) & (shares < end))

    def keys(self, schema: Schema, batch: Batch, paths: Sequence[str]) -> NDArray[np.uint64]:
        """The key of each sample of a batch; `paths` are the files they came from."""
        if self.by == "file":
            names, numbers = np.unique(np.array(paths, dtype=object), return_inverse=True)
            return hash_texts(names)[numbers]
        columns = content_columns(schema) if self.by == "content" else self.by
        return hash_samples([batch[name] for name in columns])

    def check(self, schema: Schema) -> None:
        """Refuse a split by columns that the dataset does not have.

        Raises:
            SchemaError: a column is missing; the message names those that there are.
        """
        if isinstance(self.by, str):
            return
        try:
            schema.shown.select(self.by)
        except SchemaError as error:
            raise SchemaError(f"split_by={list(self.by)}: {error} Only stored columns can decide the part.") from None

    def to_json(self) -> dict[str, Any]:
        """The part in a recipe."""
        by = self.by if isinstance(self.by, str) else list(self.by)
        return {"name": self.name, "parts": [list(part) for part in self.parts], "seed": self.seed, "by": by}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`; `ValueError` on anything else."""
        if wrong := find_mismatch(fields, SHAPE, "part"):
            raise ValueError(wrong)
        parts = tuple((name, float(share)) for name, share in fields["parts"])
        by = fields["by"] if isinstance(fields["by"], str) else tuple(fields["by"])
        if fields["name"] not in share_ranges(dict(parts)):
            raise ValueError(f"part {fields['name']!r} is not one of {parts}")
        return cls(name=fields["name"], parts=parts, seed=fields["seed"], by=by)


def plan_parts(fractions: Mapping[str, float], seed: int, by: str | Sequence[str]) -> tuple[Part, ...]:
    """The parts of a split, the largest first.

    Raises:
        TypeError: the fractions have no names, or the seed is not an int.
        ValueError: the fractions do not add up to 1, a name cannot be that of a folder, or `by` is unknown.
    """
    shares = _with_rest(fractions)
    share_ranges(shares)
    if type(seed) is not int:
        raise TypeError(f"split_seed={seed!r}; give an integer.")
    if len(shares) < 2:
        raise ValueError(f"split={dict(fractions)} is one part; give two or more, or leave split= out.")
    for name in shares:
        if not _NAME.fullmatch(name):
            raise ValueError(f"split={dict(fractions)}: {name!r} cannot name a folder; use letters, digits, _ and -.")
    if by == "index":
        raise ValueError("split_by='index' would move samples to other parts; use 'content', 'file' or columns.")
    if not isinstance(by, str):
        by = tuple(by)
    elif by not in ("content", "file"):
        by = (by,)
    parts = tuple((name, float(share)) for name, share in shares.items())
    made = [Part(name=name, parts=parts, seed=seed, by=by) for name in shares]
    return tuple(sorted(made, key=lambda part: not part.is_largest))


def _with_rest(fractions: Mapping[str, float]) -> dict[str, float]:
    """The fractions, preceded by the part "train" if they leave something for it."""
    if not isinstance(fractions, Mapping):
        raise TypeError(f"split={fractions!r}; give names and shares, as in {{'train': 0.98, 'val': 0.02}}.")
    rest = 1 - sum(fractions.values())
    return {REST: rest, **fractions} if REST not in fractions and rest > 0 else dict(fractions)


def check_destination(destination: Path, parts: Sequence[Part]) -> None:
    """Refuse a folder that is itself a dataset, holds parts of another split, or has a link where a part will be.

    Raises:
        DatasetExists: it is; the message names what is there.
    """
    if not destination.is_dir():
        return
    names = {part.name for part in parts}
    for name in sorted(names):
        if (destination / name).is_symlink():
            raise DatasetExists(f"{destination / name} is a link. Penstock does not write through it; remove it.")
    if (destination / "manifest.json").exists():
        raise DatasetExists(
            f"{destination}: a dataset is there, but split= puts {', '.join(sorted(names))} into folders of their own. "
            "Choose another destination."
        )
    strange = [name for name in find_parts(destination) if name not in names]
    if strange:
        raise DatasetExists(
            f"{destination}: {strange[0]!r} there is part of another split, so samples could be in two parts. "
            "Choose another destination, or remove it."
        )


def find_parts(destination: Path) -> list[str]:
    """Names of the parts of a split that are in a folder."""
    try:
        names = sorted(entry.name for entry in os.scandir(destination) if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []
    return [name for name in names if _is_part(destination / name)]


def _is_part(folder: Path) -> bool:
    try:
        attributes = read_manifest(folder).attributes
    except (PenstockError, OSError):
        return False
    preparation = attributes.get("preparation")
    recipe = preparation.get("recipe") if isinstance(preparation, Mapping) else None
    return isinstance(recipe, Mapping) and part_of_recipe(recipe) is not None


def part_of_recipe(recipe: Mapping[str, Any]) -> Part | None:
    """The part that a dataset was made as; None if it holds all samples, or its recipe is invalid."""
    try:
        return Part.from_json(recipe["part"])
    except (KeyError, ValueError):
        return None

"""`penstock.concat` and `Dataset.zip`: several datasets as one, where they fit together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.errors import DatasetChanged, SchemaError
from penstock.samples._concatenated import ConcatStorage
from penstock.samples._joined import AnyDataset
from penstock.samples._zipped import ZipStorage
from penstock.schema import Ragged
from penstock.shards import read_samples

_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class JoinedLocation:
    """The datasets that are joined, each with its own location."""

    kind: Literal["concat", "zip"]
    parts: tuple[AnyDataset, ...]

    def open(self, fingerprint: str | None = None) -> ConcatStorage | ZipStorage:
        """The parts as one storage."""
        storage = (ConcatStorage if self.kind == "concat" else ZipStorage)([part.samples for part in self.parts])
        if fingerprint is not None and storage.fingerprint != fingerprint:
            raise DatasetChanged(f"{self}: a part changed since it was opened. Open it again.")
        return storage

    def to_json(self) -> dict[str, Any]:
        """The parts as tables of a plan file."""
        return {self.kind: {f"part {number}": part.to_json() for number, part in enumerate(self.parts)}}

    def __str__(self) -> str:
        return f"{self.kind} of {len(self.parts)} datasets"


def check_concat(parts: Sequence[AnyDataset], different_tokenizers: bool) -> None:
    """Refuse datasets whose samples do not mean the same.

    Raises:
        SchemaError: they have different columns.
        ValueError: there is none, or their tokens or labels mean different things.
    """
    if not parts:
        raise ValueError("concat() needs at least one dataset.")
    first = parts[0].schema.to_json()
    for number, part in enumerate(parts):
        if part.schema.to_json() != first:
            raise SchemaError(
                f"concat(): dataset 0 has the columns {parts[0].schema}; dataset {number} has {part.schema}. Choose "
                "the same columns in the same order with select_columns(), or prepare them with the same types."
            )
    tokenizers = {key: name for part in parts for key, name in part.tokenizers.items()}
    if len(tokenizers) > 1 and not different_tokenizers:
        made = ", ".join(f"{name} ({key[:8]})" for key, name in tokenizers.items())
        raise ValueError(
            "concat(): the datasets were made with different tokenizers, so one token id means different things: "
            f"{made}. Prepare them with one tokenizer, or pass different_tokenizers=True if that is what you want."
        )
    check_classes("concat", (part.classes for part in parts))


def check_classes(verb: str, lists: Iterable[tuple[str, ...]]) -> None:
    """Refuse datasets whose labels mean different classes; an empty list says nothing about them."""
    classes = {names for names in lists if names}
    if len(classes) > 1:
        one, other, *_ = sorted(classes)
        raise ValueError(
            f"{verb}(): labels mean different classes: {list(one)[:5]} in one dataset, {list(other)[:5]} in another. "
            "Prepare them with one list of classes: classes=, --classes."
        )


def check_zip(one: AnyDataset, other: AnyDataset, on: Sequence[str]) -> None:
    """Refuse datasets that cannot have the same samples.

    Raises:
        SchemaError: a column is in both, and not among those to be compared; or one of these is not in both.
        ValueError: they have different numbers of samples, or values differ in the columns `on`.
    """
    if len(one) != len(other):
        raise ValueError(f"zip(): one dataset has {len(one):,} samples, the other {len(other):,}; they must match.")
    twice = [name for name in one.schema if name in other.schema and name not in on]
    if twice:
        raise SchemaError(
            f"zip(): both have a column {twice[0]!r}. Leave it out of one with select_columns(), or compare it: "
            f"on={twice[0]!r}."
        )
    for name in on:
        _compare(one, other, name)


def _compare(one: AnyDataset, other: AnyDataset, name: str) -> None:
    for begin in range(0, len(one), _CHUNK):
        indices = np.arange(begin, min(begin + _CHUNK, len(one)))
        left_values, right_values = (
            read_samples(each.samples.storage, each.schema[name], each.samples.locate(indices)) for each in (one, other)
        )
        if _are_equal(left_values, right_values):
            continue
        for number, (left, right) in enumerate(zip(left_values, right_values, strict=True)):
            if not np.array_equal(left, right):
                raise ValueError(
                    f"zip(on={name!r}): sample {begin + number:,} has {left!r:.60} in one dataset and {right!r:.60} in "
                    "the other. They do not hold the same samples in the same order."
                )


def _are_equal(one: Ragged | NDArray[Any], other: Ragged | NDArray[Any]) -> bool:
    """Whether all samples are, looked at at once."""
    if isinstance(one, Ragged) and isinstance(other, Ragged):
        return np.array_equal(one.offsets, other.offsets) and np.array_equal(one.values, other.values)
    return not isinstance(one, Ragged) and not isinstance(other, Ragged) and np.array_equal(one, other)

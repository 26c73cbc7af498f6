"""The stages that draw samples, by weight or class by class, as settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from penstock.identity import digest
from penstock.stages._checks import make_whole


class SampleWeights:
    """One number per sample, compared and told apart by a digest."""

    __slots__ = ("identity", "values")

    def __init__(self, values: ArrayLike) -> None:
        self.values = np.array(values)
        self.identity = digest(f"{self.values.dtype} {self.values.shape}".encode() + self.values.tobytes())

    def __deepcopy__(self, memo: object) -> SampleWeights:
        return self  # nobody changes it

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SampleWeights) and other.identity == self.identity

    def __hash__(self) -> int:
        return hash(self.identity)

    def __repr__(self) -> str:
        return f"<{self.values.size:,} numbers {self.identity[:8]}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighted:
    """Draw samples by weight, each as often as its share says, rounded up or down."""

    verb: ClassVar[str] = "sample"
    level: ClassVar[int] = 1
    weights: str | SampleWeights
    """A column, or one number per sample."""
    rows: int | None = None
    """Rows in an epoch; None is as many as there are samples."""
    replacement: bool = True
    """Whether a sample may come more than once in an epoch."""

    def __post_init__(self) -> None:
        if self.rows is not None:
            make_whole(self, "rows", at_least=1, at_most=2**32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Balanced:
    """Deal classes in turn, each as often as every other."""

    verb: ClassVar[str] = "balance"
    level: ClassVar[int] = 1
    column: str
    """The column whose values are the classes."""
    rows: int | None = None
    """Rows in an epoch; None is as many as there are samples, in whole rounds of all classes."""
    replacement: bool = True
    """Whether a sample may come more than once in an epoch; without it, one has as many rounds as the smallest class
    has samples."""

    def __post_init__(self) -> None:
        if self.rows is not None:
            make_whole(self, "rows", at_least=1, at_most=2**62)

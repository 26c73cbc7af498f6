"""The stages a plan is made of, as settings that are checked when they are made.

A stage's level is where it may come:

    level   0       1                    2          3                       4                     5      6
            cast -> sample or balance -> shuffle -> window, pack or pad -> take, skip, repeat -> map -> batch

A map cannot come before `pack`: what is packed is decided from the lengths in the index, and a map
would have to run on every document before the first row is known. Do it when the data is prepared.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from penstock.errors import StageError, check_choice, whole_number
from penstock.identity import GrowingDigest
from penstock.packing import PackingSettings

Mode = Literal["windows", "full"]
Tail = Literal["carry", "short", "even", "pad", "drop"]
Labels = Literal["next", "same"]
Positions = Literal["restart", "continue"]
Side = Literal["right", "left"]
OnFault = Literal["raise", "skip"]

Costs = tuple[tuple[str, float], ...]
"""(measure, weight): "tokens", "attention" or a column, each counted so many times."""
TOKENS, ATTENTION = "tokens", "attention"

IGNORED = -100
"""The label where nothing is predicted; torch's losses leave it out."""


def _make_whole(stage: Stage, name: str, *, at_least: int | None = None, at_most: int | None = None) -> None:
    """Make a field a Python int; `TypeError` or `ValueError` if it is not a number in range."""
    number = whole_number(stage.verb, name, getattr(stage, name), at_least=at_least, at_most=at_most)
    object.__setattr__(stage, name, number)


def _check_choice(stage: Stage, name: str, choices: Any) -> None:
    """Refuse a value that is not among those of a `Literal`."""
    check_choice(name, getattr(stage, name), get_args(choices), verb=stage.verb)


def _check_names(stage: Stage, name: str) -> None:
    """Refuse what cannot be names of columns."""
    if not all(isinstance(each, str) for each in getattr(stage, name)):
        raise TypeError(f"{stage.verb}({name}={getattr(stage, name)!r}): the names of columns are needed.")


def costs_of(balance: object) -> Costs:
    """What batch(balance=...) counts: one measure, or a weighted sum of several.

    Raises:
        TypeError: it is neither a name nor names with numbers.
        ValueError: there are none, or a weight is not positive.
    """
    if isinstance(balance, str):
        return ((balance, 1.0),)
    items = tuple(balance.items()) if isinstance(balance, Mapping) else balance
    if not isinstance(items, tuple) or not all(
        isinstance(name, str) and isinstance(weight, Real) for name, weight in items
    ):
        raise TypeError(f'batch(balance={balance!r}): "attention", "tokens", a column, or {{name: weight}} is needed.')
    if not items or not all(0 < weight < math.inf for _, weight in items):
        raise ValueError(f"batch(balance={balance!r}): at least one name, and weights above 0, are needed.")
    return tuple((name, float(weight)) for name, weight in items)


_HASHED = 1 << 20


class SampleWeights:
    """One number per sample, compared by a digest."""

    __slots__ = ("identity", "values")

    def __init__(self, values: ArrayLike) -> None:
        self.values = np.array(values)
        seen, flat = GrowingDigest(), self.values.ravel()
        self.identity = seen.add(f"{self.values.dtype} {self.values.shape}")
        for begin in range(0, len(flat), _HASHED):
            self.identity = seen.add(flat[begin : begin + _HASHED].tobytes())

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
    """Draw samples by weight; `Verbs.sample` describes the settings of this stage, and so on for the others."""

    verb: ClassVar[str] = "sample"
    level: ClassVar[int] = 1
    weights: str | SampleWeights
    rows: int | None = None
    replacement: bool = True

    def __post_init__(self) -> None:
        if self.rows is not None:
            _make_whole(self, "rows", at_least=1, at_most=2**32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Balanced:
    """Deal classes in turn, each as often as every other."""

    verb: ClassVar[str] = "balance"
    level: ClassVar[int] = 1
    column: str
    rows: int | None = None
    replacement: bool = True

    def __post_init__(self) -> None:
        if self.rows is not None:
            _make_whole(self, "rows", at_least=1, at_most=2**62)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """Read columns in a wider dtype; done inside the gather, so it costs no second pass."""

    verb: ClassVar[str] = "cast"
    level: ClassVar[int] = 0
    dtypes: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shuffle:
    """Another order in each epoch, computed on the fly."""

    verb: ClassVar[str] = "shuffle"
    level: ClassVar[int] = 2
    seed: int
    mode: Mode = "windows"
    group: int | None = None
    """None until `with_groups` writes the default out."""
    lanes: int = 1

    def __post_init__(self) -> None:
        _make_whole(self, "seed")
        _make_whole(self, "lanes", at_least=1, at_most=2**20)
        if self.group is not None:
            _make_whole(self, "group", at_least=1, at_most=2**62)
        _check_choice(self, "mode", Mode)
        if self.lanes > 1 and self.mode == "full":
            raise ValueError("shuffle(mode='full', lanes=...): rows of a full shuffle may be anywhere. Leave one out.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Rows are fixed windows of all documents, one after the other."""

    verb: ClassVar[str] = "window"
    level: ClassVar[int] = 3
    length: int
    column: str = "tokens"

    def __post_init__(self) -> None:
        _make_whole(self, "length", at_least=1, at_most=2**40)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """Rows are whole documents side by side, chosen so that next to nothing is padding."""

    verb: ClassVar[str] = "pack"
    level: ClassVar[int] = 3
    settings: PackingSettings
    column: str = "tokens"
    labels: Labels = "next"
    positions: Positions = "restart"
    pad: int = 0
    keep: tuple[str, ...] = ()
    cost: str | None = None
    limits: tuple[str, ...] = ()
    """The columns of the budgets in `settings.limits`."""

    def __post_init__(self) -> None:
        _make_whole(self, "pad", at_least=-(2**63), at_most=2**63 - 1)
        _check_choice(self, "labels", Labels)
        _check_choice(self, "positions", Positions)
        _check_names(self, "keep")
        if self.cost is not None and self.settings.long != "drop":
            raise ValueError(
                f"pack(cost={self.cost!r}, long={self.settings.long!r}): documents that cost more than their tokens "
                "are not cut. With long='drop', those that cost more than a row are left out and counted."
            )

    @property
    def counted(self) -> tuple[str, ...]:
        """The columns that say how much of a row's budgets a document takes."""
        return (self.cost or self.column, *self.limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pad:
    """Rows are single documents, padded to the longest of a batch."""

    verb: ClassVar[str] = "pad"
    level: ClassVar[int] = 3
    length: int | None = None
    multiple: int = 1
    column: str = "tokens"
    labels: Labels = "next"
    pad: int = 0
    side: Side = "right"
    keep: tuple[str, ...] = ()
    bucket: int | None = None
    run: int = 32
    run_tokens: int | None = None

    def __post_init__(self) -> None:
        limits = {"length": 2**40, "multiple": 2**40, "bucket": 2**24, "run": 2**24, "run_tokens": 2**40}
        for name, most in limits.items():
            if getattr(self, name) is not None:
                _make_whole(self, name, at_least=1, at_most=most)
        if self.run_tokens is not None and self.bucket is None:
            raise ValueError(
                "pad(run_tokens=...) is for pad(bucket=...): without one, rows come in no order of length."
            )
        _make_whole(self, "pad", at_least=-(2**63), at_most=2**63 - 1)
        _check_choice(self, "labels", Labels)
        _check_choice(self, "side", Side)
        _check_names(self, "keep")


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeRows:
    """An epoch is its first rows; or more than all of them, in several passes."""

    verb: ClassVar[str] = "take"
    level: ClassVar[int] = 4
    rows: int | None = None
    tokens: float | None = None

    def __post_init__(self) -> None:
        if (self.rows is None) == (self.tokens is None):
            raise ValueError("take(): give rows=, the rows in an epoch, or tokens=, the places for tokens in it.")
        if isinstance(self.tokens, float) and self.tokens.is_integer():  # 300e9 is how people write it
            object.__setattr__(self, "tokens", int(self.tokens))
        _make_whole(self, "rows" if self.tokens is None else "tokens", at_least=1, at_most=2**62)


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """An epoch is all but its first rows."""

    verb: ClassVar[str] = "skip"
    level: ClassVar[int] = 4
    rows: int

    def __post_init__(self) -> None:
        _make_whole(self, "rows", at_least=0, at_most=2**62)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """An epoch is several passes, each shuffled anew."""

    verb: ClassVar[str] = "repeat"
    level: ClassVar[int] = 4
    times: int

    def __post_init__(self) -> None:
        _make_whole(self, "times", at_least=1, at_most=2**40)


@dataclass(frozen=True, slots=True, kw_only=True)
class Map:
    """A function of each row, or of each batch of rows."""

    verb: ClassVar[str] = "map"
    level: ClassVar[int] = 5
    function: Callable[..., Any]
    batched: bool = False
    ragged: tuple[str, ...] = ()
    on_error: OnFault = "raise"

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"map({self.function!r}): a function is needed.")
        _check_names(self, "ragged")
        _check_choice(self, "on_error", OnFault)
        if self.on_error == "skip" and self.batched:
            raise ValueError("map(on_error='skip', batched=True): only a function of single rows can be given another.")
        if self.ragged and self.batched:
            raise ValueError("map(ragged=..., batched=True): a function of a batch returns `Ragged` columns itself.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Cut the endless sequence of rows into batches; `Steps` says what each `tail` does."""

    verb: ClassVar[str] = "batch"
    level: ClassVar[int] = 6
    global_size: int | None = None
    tail: Tail = "carry"
    balance: str | Costs | None = None
    """As the user said; a mapping is kept as its items."""
    tokens: int | None = None
    multiple: int = 1
    long: Literal["raise", "drop"] = "raise"

    def __post_init__(self) -> None:
        if (self.global_size is None) == (self.tokens is None):
            raise ValueError("batch(): give the number of rows, or tokens=, the budget of their tokens.")
        _make_whole(self, "global_size" if self.tokens is None else "tokens", at_least=1, at_most=2**40)
        _make_whole(self, "multiple", at_least=1, at_most=2**40)
        _check_choice(self, "tail", Tail)
        check_choice("long", self.long, ("raise", "drop"), verb="batch")
        if self.tokens is None and (self.multiple, self.long) != (1, "raise"):
            raise ValueError("batch(): multiple= and long= are for batch(tokens=...).")
        if self.long == "drop" and self.tail == "even":
            raise ValueError(
                "batch(long='drop', tail='even'): what stands in for a long row is not counted; use tail='pad'."
            )
        if self.balance is not None and not isinstance(self.balance, str):
            object.__setattr__(self, "balance", costs_of(self.balance))


Stage = Cast | Weighted | Balanced | Shuffle | Window | Pack | Pad | TakeRows | Skip | Repeat | Map | Batch
Stages = tuple[Stage, ...]


LEGAL_ORDER = (
    "select_columns, cast -> sample or balance -> shuffle -> window, pack or pad -> (mix) -> take, skip, repeat -> "
    "map, map, ... -> batch"
)
_REPEATABLE = (Cast, TakeRows, Skip, Repeat, Map)


def check_next(stages: Sequence[Stage], stage: Stage) -> None:
    """Refuse a stage that cannot follow those before it.

    Raises:
        StageError: out of order, or a second one of a kind that may be there only once; or it has no lanes.
    """
    last = stages[-1] if stages else None
    if last is not None and (
        stage.level < last.level or (stage.level == last.level and not isinstance(stage, _REPEATABLE))
    ):
        raise StageError(
            f"{stage.verb}() cannot follow {last.verb}(). The order is {LEGAL_ORDER}.{_advice(stage, last)}"
        )
    _check_lanes((*stages, stage))


# Measured by benchmarks/bench_mixing.py, in docs/plans.md. Storage windows of packed documents are larger, and all of a
# group is packed before its first row is known. The groups of all lanes are read at once, and their windows are shards.
GROUP, PACKED_GROUP, LANE_GROUP = 256, 16, 2


def with_groups(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """The stages with the default group written out: 256 windows of 4 MiB, 16 of the larger ones that are packed.

    In each lane it is 2 shards. A full shuffle has no groups; its number is what its fingerprint has always had.
    """
    is_packed = any(isinstance(stage, Pack) for stage in stages)

    def group_of(stage: Shuffle) -> int:
        if stage.lanes > 1:
            return LANE_GROUP
        return PACKED_GROUP if is_packed or stage.mode == "full" else GROUP

    return tuple(
        dataclasses.replace(stage, group=group_of(stage))
        if isinstance(stage, Shuffle) and stage.group is None
        else stage
        for stage in stages
    )


def num_lanes(stages: Sequence[Stage]) -> int:
    """How many lanes the shuffle has, if there is one."""
    return max((stage.lanes for stage in stages if isinstance(stage, Shuffle)), default=1)


def _check_lanes(stages: Sequence[Stage]) -> None:
    """Refuse lanes where another stage sends rows anywhere."""
    for stage in stages if num_lanes(stages) > 1 else ():
        is_bucketed = isinstance(stage, Pad) and stage.bucket is not None
        cut_by = "bucket=..." if is_bucketed else ""
        if isinstance(stage, Batch):
            cut_by = "balance=..." if stage.balance is not None else "tokens=..." if stage.tokens is not None else ""
        if cut_by or isinstance(stage, (Weighted, Balanced)):
            verb = f"{stage.verb}({cut_by})"
            raise StageError(
                f"shuffle(lanes=...) and {verb}: lanes give each rank a part of the data of its own, and {verb} sends "
                "rows from one to another. Leave one of them out."
            )


def without_groups(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """The stages with a group left out that is the default one: what `with_groups` wrote out, as a user writes it."""
    bare = tuple(dataclasses.replace(stage, group=None) if isinstance(stage, Shuffle) else stage for stage in stages)
    return bare if with_groups(bare) == with_groups(stages) else tuple(stages)


def _advice(stage: Stage, last: Stage) -> str:
    if isinstance(stage, (Pack, Pad, Window)) and isinstance(last, Map):
        return " Lengths must come from the index: do what the map does when the data is prepared."
    return ""

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
OnLong = Literal["raise", "drop"]

Costs = tuple[tuple[str, float], ...]
"""(measure, weight): "tokens", "attention" or a column, each counted so many times."""
TOKENS, ATTENTION = "tokens", "attention"

IGNORED = -100
"""The label where nothing is predicted; torch's losses leave it out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A verb with its settings, which are checked when they are made. `Verbs` says what each of them does."""

    verb: ClassVar[str]
    level: ClassVar[int]
    whole: ClassVar[tuple[tuple[str, int | None, int | None], ...]] = ()
    """(field, least, greatest) of whole numbers; those that are None by default may be None."""
    choices: ClassVar[tuple[tuple[str, Any], ...]] = ()
    """(field, its `Literal`) of those that are one of a few values."""
    names: ClassVar[str | None] = None
    """The field that names columns."""

    def __post_init__(self) -> None:
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name, least, most in self.whole:
            value = getattr(self, name)
            if value is not None or defaults[name] is not None:
                number = whole_number(self.verb, name, value, at_least=least, at_most=most)
                object.__setattr__(self, name, number)
        for name, choices in self.choices:
            check_choice(name, getattr(self, name), get_args(choices), verb=self.verb)
        if self.names and not all(isinstance(each, str) for each in getattr(self, self.names)):
            raise TypeError(
                f"{self.verb}({self.names}={getattr(self, self.names)!r}): the names of columns are needed."
            )


Stages = tuple[Stage, ...]


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
class Weighted(Stage):
    """Draw samples by weight."""

    verb, level = "sample", 1
    whole = (("rows", 1, 2**32),)
    weights: str | SampleWeights
    rows: int | None = None
    replacement: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Balanced(Stage):
    """Deal classes in turn, each as often as every other."""

    verb, level = "balance", 1
    whole = (("rows", 1, 2**62),)
    column: str
    rows: int | None = None
    replacement: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast(Stage):
    """Read columns in a wider dtype; done inside the gather, so it costs no second pass."""

    verb, level = "cast", 0
    dtypes: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shuffle(Stage):
    """Another order in each epoch, computed on the fly."""

    verb, level = "shuffle", 2
    whole = (("seed", None, None), ("lanes", 1, 2**20), ("group", 1, 2**62))
    choices = (("mode", Mode),)
    seed: int
    mode: Mode = "windows"
    group: int | None = None
    """None until `with_groups` writes the default out."""
    lanes: int = 1

    def __post_init__(self) -> None:
        Stage.__post_init__(self)
        if self.lanes > 1 and self.mode == "full":
            raise ValueError("shuffle(mode='full', lanes=...): rows of a full shuffle may be anywhere. Leave one out.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Window(Stage):
    """Rows are fixed windows of all documents, one after the other."""

    verb, level = "window", 3
    whole = (("length", 1, 2**40),)
    length: int
    column: str = "tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack(Stage):
    """Rows are whole documents side by side, chosen so that next to nothing is padding."""

    verb, level = "pack", 3
    whole = (("pad", -(2**63), 2**63 - 1),)
    choices = (("labels", Labels), ("positions", Positions))
    names = "keep"
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
        Stage.__post_init__(self)
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
class Pad(Stage):
    """Rows are single documents, padded to the longest of a batch."""

    verb, level = "pad", 3
    whole = (
        ("length", 1, 2**40),
        ("multiple", 1, 2**40),
        ("bucket", 1, 2**24),
        ("run", 1, 2**24),
        ("run_tokens", 1, 2**40),
        ("pad", -(2**63), 2**63 - 1),
    )
    choices = (("labels", Labels), ("side", Side))
    names = "keep"
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
        Stage.__post_init__(self)
        if self.run_tokens is not None and self.bucket is None:
            raise ValueError(
                "pad(run_tokens=...) is for pad(bucket=...): without one, rows come in no order of length."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeRows(Stage):
    """An epoch is its first rows; or more than all of them, in several passes."""

    verb, level = "take", 4
    whole = (("rows", 1, 2**62), ("tokens", 1, 2**62))
    rows: int | None = None
    tokens: float | None = None

    def __post_init__(self) -> None:
        if (self.rows is None) == (self.tokens is None):
            raise ValueError("take(): give rows=, the rows in an epoch, or tokens=, the places for tokens in it.")
        if isinstance(self.tokens, float) and self.tokens.is_integer():  # 300e9 is how people write it
            object.__setattr__(self, "tokens", int(self.tokens))
        Stage.__post_init__(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip(Stage):
    """An epoch is all but its first rows."""

    verb, level = "skip", 4
    whole = (("rows", 0, 2**62),)
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat(Stage):
    """An epoch is several passes, each shuffled anew."""

    verb, level = "repeat", 4
    whole = (("times", 1, 2**40),)
    times: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Map(Stage):
    """A function of each row, or of each batch of rows."""

    verb, level = "map", 5
    choices = (("on_error", OnFault),)
    names = "ragged"
    function: Callable[..., Any]
    batched: bool = False
    ragged: tuple[str, ...] = ()
    on_error: OnFault = "raise"

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"map({self.function!r}): a function is needed.")
        Stage.__post_init__(self)
        if self.on_error == "skip" and self.batched:
            raise ValueError("map(on_error='skip', batched=True): only a function of single rows can be given another.")
        if self.ragged and self.batched:
            raise ValueError("map(ragged=..., batched=True): a function of a batch returns `Ragged` columns itself.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(Stage):
    """Cut the endless sequence of rows into batches; `Steps` says what each `tail` does."""

    verb, level = "batch", 6
    whole = (("global_size", 1, 2**40), ("tokens", 1, 2**40), ("multiple", 1, 2**40))
    choices = (("tail", Tail), ("long", OnLong))
    global_size: int | None = None
    tail: Tail = "carry"
    balance: str | Costs | None = None
    """As the user said; a mapping is kept as its items."""
    tokens: int | None = None
    multiple: int = 1
    long: OnLong = "raise"

    def __post_init__(self) -> None:
        if (self.global_size is None) == (self.tokens is None):
            raise ValueError("batch(): give the number of rows, or tokens=, the budget of their tokens.")
        Stage.__post_init__(self)
        if self.tokens is None and (self.multiple, self.long) != (1, "raise"):
            raise ValueError("batch(): multiple= and long= are for batch(tokens=...).")
        if self.long == "drop" and self.tail == "even":
            raise ValueError(
                "batch(long='drop', tail='even'): what stands in for a long row is not counted; use tail='pad'."
            )
        if self.balance is not None and not isinstance(self.balance, str):
            object.__setattr__(self, "balance", costs_of(self.balance))


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

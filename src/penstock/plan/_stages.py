"""The stages a plan is made of, as settings that are checked when they are made.

A stage's level is where it may come (`_stage_rules.py`):

    level   0       1          2                 3                     4      5
            cast -> shuffle -> window or pack -> take, skip, repeat -> map -> batch
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from penstock.packing import PackingSettings
from penstock.plan._arguments import whole_number

Mode = Literal["windows", "full"]
Tail = Literal["carry", "short", "even", "pad", "drop"]
Labels = Literal["next", "same"]
Positions = Literal["restart", "continue"]

IGNORED = -100
"""The label where nothing is predicted; torch's losses leave it out."""


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
    level: ClassVar[int] = 1
    seed: int
    """Decides the order; any integer."""
    mode: Mode = "windows"
    """"windows" permutes stretches of data and the rows within a group of them: reads stay local.
    "full" permutes everything and reads randomly."""
    group: int | None = None
    """Windows that are mixed with each other: more mixes wider, reads from more places at once and, when packed,
    keeps 5 bytes per document of them in memory. None is about a gigabyte of them: see `with_groups`."""

    def __post_init__(self) -> None:
        _make_whole(self, "seed")
        if self.group is not None:
            _make_whole(self, "group", at_least=1, at_most=2**62)
        if self.mode not in ("windows", "full"):
            raise ValueError(f"shuffle(mode={self.mode!r}): the modes are 'windows' and 'full'.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Rows are fixed windows of all documents, one after the other."""

    verb: ClassVar[str] = "window"
    level: ClassVar[int] = 2
    length: int
    """Tokens in a row."""
    column: str = "tokens"
    """The column that is cut."""

    def __post_init__(self) -> None:
        _make_whole(self, "length", at_least=1, at_most=2**40)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """Rows are whole documents side by side, chosen so that next to nothing is padding."""

    verb: ClassVar[str] = "pack"
    level: ClassVar[int] = 2
    settings: PackingSettings
    column: str = "tokens"
    """The column that is packed."""
    labels: Labels = "next"
    """"next": labels[t] is the token after t. "same": labels[t] is token t, and the model shifts, as
    Hugging Face's do."""
    positions: Positions = "restart"
    """Where the positions of the later pieces of a split document begin: at 0, or where the piece lies."""
    pad: int = 0
    """Token id in places that hold no token; attention and loss never see it."""

    def __post_init__(self) -> None:
        _make_whole(self, "pad", at_least=-(2**63), at_most=2**63 - 1)
        if self.labels not in ("next", "same"):
            raise ValueError(f"pack(labels={self.labels!r}): the choices are 'next' and 'same'.")
        if self.positions not in ("restart", "continue"):
            raise ValueError(f"pack(positions={self.positions!r}): the choices are 'restart' and 'continue'.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeRows:
    """An epoch is its first rows; or more than all of them, in several passes."""

    verb: ClassVar[str] = "take"
    level: ClassVar[int] = 3
    rows: int | None = None
    """Rows in an epoch."""
    tokens: float | None = None
    """Or as many rows as have places for this many tokens, rounded down."""

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
    level: ClassVar[int] = 3
    rows: int
    """Rows left out at the start of every epoch."""

    def __post_init__(self) -> None:
        _make_whole(self, "rows", at_least=0, at_most=2**62)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """An epoch is several passes."""

    verb: ClassVar[str] = "repeat"
    level: ClassVar[int] = 3
    times: int
    """Passes in an epoch; each is shuffled anew."""

    def __post_init__(self) -> None:
        _make_whole(self, "times", at_least=1, at_most=2**40)


@dataclass(frozen=True, slots=True, kw_only=True)
class Map:
    """A function of each row, or of each batch of rows."""

    verb: ClassVar[str] = "map"
    level: ClassVar[int] = 4
    function: Callable[..., Any]
    batched: bool = False
    """Give the function a whole batch, as arrays, instead of one row."""
    ragged: tuple[str, ...] = ()
    """Columns that are `Ragged` in every batch, also where their rows happen to be of one length."""

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"map({self.function!r}): a function is needed.")
        if not all(isinstance(name, str) for name in self.ragged):
            raise TypeError(f"map(ragged={self.ragged!r}): the names of columns are needed.")
        if self.ragged and self.batched:
            raise ValueError("map(ragged=..., batched=True): a function of a batch returns `Ragged` columns itself.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Cut the endless sequence of rows into batches."""

    verb: ClassVar[str] = "batch"
    level: ClassVar[int] = 5
    global_size: int
    """Rows per step over all ranks."""
    tail: Tail = "carry"
    """What becomes of an epoch's last rows: "carry" lets a batch span two epochs; "short" gives a
    smaller batch, and some ranks none of it; "even" gives a smaller batch with as many rows for every rank, one at
    least, by repeating some and marking them; "pad" repeats rows up to a full batch, and hides their labels; "drop"
    leaves them out and counts them."""

    def __post_init__(self) -> None:
        _make_whole(self, "global_size", at_least=1, at_most=2**40)
        if self.tail not in get_args(Tail):
            raise ValueError(f"batch(tail={self.tail!r}): the tails are {', '.join(map(repr, get_args(Tail)))}.")


Stage = Cast | Shuffle | Window | Pack | TakeRows | Skip | Repeat | Map | Batch


def _make_whole(stage: Stage, name: str, *, at_least: int | None = None, at_most: int | None = None) -> None:
    number = whole_number(stage.verb, name, getattr(stage, name), at_least=at_least, at_most=at_most)
    object.__setattr__(stage, name, number)

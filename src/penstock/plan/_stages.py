"""The stages a plan is made of, as settings, and the one order in which they make sense.

    cast -> shuffle -> window or pack -> map (any number) -> batch

A map cannot come before `pack`: what is packed is decided from the lengths in the index, and a map
would have to run on every document before the first row is known. Do it when the data is prepared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from penstock.errors import StageError
from penstock.packing import PackingSettings

Mode = Literal["windows", "full"]
Tail = Literal["carry", "short", "pad", "drop"]
Labels = Literal["next", "same"]
Positions = Literal["restart", "continue"]

LEGAL_ORDER = "select_columns, cast -> shuffle -> window or pack -> (mix) -> map, map, ... -> batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """Read columns in a wider dtype; done inside the gather, so it costs no second pass."""

    verb: ClassVar[str] = "cast"
    rank: ClassVar[int] = 0
    dtypes: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shuffle:
    """Another order in each epoch, computed on the fly."""

    verb: ClassVar[str] = "shuffle"
    rank: ClassVar[int] = 1
    seed: int
    """Decides the order; any integer."""
    mode: Mode = "windows"
    """"windows" permutes stretches of data and the rows within a group of them: reads stay local.
    "full" permutes everything and reads randomly."""
    group: int = 16
    """Windows that are mixed with each other: more mixes wider and reads from more places at once."""

    def __post_init__(self) -> None:
        if type(self.seed) is not int:
            raise TypeError(f"shuffle(seed={self.seed!r}): the seed must be an int.")
        if self.mode not in ("windows", "full"):
            raise ValueError(f"shuffle(mode={self.mode!r}): the modes are 'windows' and 'full'.")
        if type(self.group) is not int or not 1 <= self.group <= 2**62:
            raise ValueError(f"shuffle(group={self.group!r}): one window makes a group, and at most 2**62 do.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Rows are fixed windows of all documents written one behind the other."""

    verb: ClassVar[str] = "window"
    rank: ClassVar[int] = 2
    length: int
    """Tokens in a row."""
    column: str = "tokens"
    """The column that is cut."""

    def __post_init__(self) -> None:
        if type(self.length) is not int or self.length < 1:
            raise ValueError(f"window(length={self.length!r}): a row has at least one token.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """Rows are whole documents side by side, chosen so that next to nothing is padding."""

    verb: ClassVar[str] = "pack"
    rank: ClassVar[int] = 2
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
        if self.labels not in ("next", "same"):
            raise ValueError(f"pack(labels={self.labels!r}): the choices are 'next' and 'same'.")
        if self.positions not in ("restart", "continue"):
            raise ValueError(f"pack(positions={self.positions!r}): the choices are 'restart' and 'continue'.")
        if type(self.pad) is not int or not -(2**63) <= self.pad < 2**63:
            raise ValueError(f"pack(pad={self.pad!r}): a token id is an int of 64 bits.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Map:
    """A function of each row, or of each batch of rows."""

    verb: ClassVar[str] = "map"
    rank: ClassVar[int] = 3
    function: Callable[..., Any]
    batched: bool = False
    """Give the function a whole batch, as arrays, instead of one row."""

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"map({self.function!r}): a function is needed.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Cut the endless sequence of rows into batches."""

    verb: ClassVar[str] = "batch"
    rank: ClassVar[int] = 4
    global_size: int
    """Rows per step over all ranks."""
    tail: Tail = "carry"
    """What becomes of an epoch's last rows: "carry" lets a batch span two epochs; "short" gives a
    smaller batch; "pad" repeats rows and marks them; "drop" leaves them out and counts them."""

    def __post_init__(self) -> None:
        if type(self.global_size) is not int or self.global_size < 1:
            raise ValueError(f"batch(global_size={self.global_size!r}): a batch has at least one row.")
        if self.tail not in ("carry", "short", "pad", "drop"):
            raise ValueError(f"batch(tail={self.tail!r}): the tails are 'carry', 'short', 'pad' and 'drop'.")


Stage = Cast | Shuffle | Window | Pack | Map | Batch


def check_next(stages: Sequence[Stage], stage: Stage) -> None:
    """Refuse a stage that cannot follow the ones that are there.

    Raises:
        StageError: out of order, or a second one of a kind that can be there once.
    """
    last = stages[-1] if stages else None
    can_repeat = isinstance(stage, (Cast, Map))
    if last is not None and (stage.rank < last.rank or (stage.rank == last.rank and not can_repeat)):
        raise StageError(
            f"{stage.verb}() cannot follow {last.verb}(). The order is {LEGAL_ORDER}.{_advice(stage, last)}"
        )


def _advice(stage: Stage, last: Stage) -> str:
    if isinstance(stage, (Pack, Window)) and isinstance(last, Map):
        return " Lengths must come from the index: do what the map does when the data is prepared."
    return ""

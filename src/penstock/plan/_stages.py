"""The stages a plan is made of, as settings, the one order in which they make sense, and how they are written.

    level   0        1          2                 3                 4
            cast ->  shuffle -> window or pack -> map (any number) -> batch

A map cannot come before `pack`: what is packed is decided from the lengths in the index, and a map
would have to run on every document before the first row is known. Do it when the data is prepared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from penstock.errors import StageError
from penstock.identity import function_identity
from penstock.packing import PackingSettings
from penstock.plan._arguments import whole_number

Mode = Literal["windows", "full"]
Tail = Literal["carry", "short", "even", "pad", "drop"]
Labels = Literal["next", "same"]
Positions = Literal["restart", "continue"]

IGNORED = -100
"""The label where nothing is predicted; torch's losses leave it out."""

LEGAL_ORDER = "select_columns, cast -> shuffle -> window or pack -> (mix) -> map, map, ... -> batch"


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
class Map:
    """A function of each row, or of each batch of rows."""

    verb: ClassVar[str] = "map"
    level: ClassVar[int] = 3
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
    level: ClassVar[int] = 4
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


Stage = Cast | Shuffle | Window | Pack | Map | Batch


def check_next(stages: Sequence[Stage], stage: Stage) -> None:
    """Refuse a stage that cannot follow those before it.

    Raises:
        StageError: out of order, or a second one of a kind that may be there only once.
    """
    last = stages[-1] if stages else None
    can_repeat = isinstance(stage, (Cast, Map))
    if last is not None and (stage.level < last.level or (stage.level == last.level and not can_repeat)):
        raise StageError(
            f"{stage.verb}() cannot follow {last.verb}(). The order is {LEGAL_ORDER}.{_advice(stage, last)}"
        )


# Measured by benchmarks/bench_mixing.py, in docs/plans.md. Storage windows of packed documents are larger, and all of a
# group is packed before its first row is known.
GROUP, PACKED_GROUP = 256, 16


def with_groups(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """The stages with the default group written out: 256 windows of 4 MiB, 16 of the larger ones that are packed.

    A full shuffle has no groups; its number is the one that its fingerprint has always had.
    """
    is_packed = any(isinstance(stage, Pack) for stage in stages)
    return tuple(
        dataclasses.replace(stage, group=PACKED_GROUP if is_packed or stage.mode == "full" else GROUP)
        if isinstance(stage, Shuffle) and stage.group is None
        else stage
        for stage in stages
    )


def without_groups(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """The stages with a group left out that is the default one: what `with_groups` wrote out, as a user writes it."""
    bare = tuple(dataclasses.replace(stage, group=None) if isinstance(stage, Shuffle) else stage for stage in stages)
    return bare if with_groups(bare) == with_groups(stages) else tuple(stages)


_DECIDING = {
    "shuffle": ("seed", "mode", "group"),
    "window": ("length", "column"),
    "pack": ("length", "long", "max_documents", "column"),
}
"""The settings that decide the order of rows; the others only decide what a row looks like."""


def order_facts(stages: Sequence[Stage]) -> dict[str, str]:
    """The settings that decide which documents are row i of epoch e, stage by stage, short enough for a state."""
    facts = {}
    for stage in with_groups(stages):
        if stage.verb in _DECIDING:
            settings = dataclasses.asdict(stage)
            settings |= settings.pop("settings", {})
            facts[stage.verb] = ", ".join(f"{name}={settings[name]!r}" for name in _DECIDING[stage.verb])
    return facts


def stage_identity(stage: Stage) -> Any:
    """JSON of a stage's settings."""
    if isinstance(stage, Map):
        ragged = [sorted(stage.ragged)] if stage.ragged else []
        return ["map", function_identity(stage.function), stage.batched, *ragged]
    return [stage.verb, dataclasses.asdict(stage)]


def describe_stage(stage: Stage) -> str:
    """A stage as it was written."""
    if isinstance(stage, Map):
        name = getattr(stage.function, "__qualname__", repr(stage.function))
        ragged = f", ragged={list(stage.ragged)!r}" if stage.ragged else ""
        return f"map({name}{', batched=True' if stage.batched else ''}{ragged})"
    if isinstance(stage, Cast):
        return f"cast({', '.join(f'{name}={dtype!r}' for name, dtype in stage.dtypes)})"
    return f"{stage.verb}({', '.join(f'{name}={value!r}' for name, value in stage_arguments(stage).items())})"


def stage_arguments(stage: Stage) -> dict[str, Any]:
    """Arguments of the verb that adds a stage, except those left at their default."""
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(stage):
        value = getattr(stage, field.name)
        if field.name == "settings":
            arguments |= {
                f.name: getattr(value, f.name) for f in dataclasses.fields(value) if getattr(value, f.name) != f.default
            }
        elif value != field.default:
            arguments[field.name] = value
    return arguments


def _make_whole(stage: Stage, name: str, *, at_least: int | None = None, at_most: int | None = None) -> None:
    number = whole_number(stage.verb, name, getattr(stage, name), at_least=at_least, at_most=at_most)
    object.__setattr__(stage, name, number)


def _advice(stage: Stage, last: Stage) -> str:
    if isinstance(stage, (Pack, Window)) and isinstance(last, Map):
        return " Lengths must come from the index: do what the map does when the data is prepared."
    return ""

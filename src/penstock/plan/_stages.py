"""The stages a plan is made of, as settings that are checked when they are made.

A stage's level is where it may come (`_rules.py`):

    level   0       1                    2          3                       4                     5      6
            cast -> sample or balance -> shuffle -> window, pack or pad -> take, skip, repeat -> map -> batch

The one order in which stages make sense, and how they are written: for people, for files, for fingerprints.

A map cannot come before `pack`: what is packed is decided from the lengths in the index, and a map
would have to run on every document before the first row is known. Do it when the data is prepared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from penstock.errors import StageError, check_choice, whole_number
from penstock.identity import digest, function_identity, importable_name
from penstock.packing import PackingSettings

Mode = Literal["windows", "full"]
Tail = Literal["carry", "short", "even", "pad", "drop"]
Labels = Literal["next", "same"]
Positions = Literal["restart", "continue"]
Side = Literal["right", "left"]
OnError = Literal["raise", "skip"]

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


class SampleWeights:
    """One number per sample, compared by a digest."""

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
            _make_whole(self, "rows", at_least=1, at_most=2**32)


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
        _check_choice(self, "mode", Mode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Rows are fixed windows of all documents, one after the other."""

    verb: ClassVar[str] = "window"
    level: ClassVar[int] = 3
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
    level: ClassVar[int] = 3
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
    keep: tuple[str, ...] = ()
    """Columns to have beside the tokens."""

    def __post_init__(self) -> None:
        _make_whole(self, "pad", at_least=-(2**63), at_most=2**63 - 1)
        _check_choice(self, "labels", Labels)
        _check_choice(self, "positions", Positions)
        _check_names(self, "keep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pad:
    """Rows are single documents, padded to the longest of a batch."""

    verb: ClassVar[str] = "pad"
    level: ClassVar[int] = 3
    length: int | None = None
    """Documents longer than this are cut off there; None keeps them whole."""
    multiple: int = 1
    """Rows are a multiple of this many tokens long; with multiple=length, always `length`."""
    column: str = "tokens"
    """The column that holds the tokens."""
    labels: Labels = "next"
    """As for pack()."""
    pad: int = 0
    """Token id in places that hold no token."""
    side: Side = "right"
    """Where the padding is: "left" is for models that generate."""
    keep: tuple[str, ...] = ()
    """Columns to have beside the tokens."""
    bucket: int | None = None
    """Rows that are sorted by length among each other, so that those of a batch are alike; None sorts none."""
    run: int = 32
    """Rows of like length that then stay together; the batch size, or a multiple of it, pads least."""

    def __post_init__(self) -> None:
        for name, most in (("length", 2**40), ("multiple", 2**40), ("bucket", 2**24), ("run", 2**24)):
            if getattr(self, name) is not None:
                _make_whole(self, name, at_least=1, at_most=most)
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
    level: ClassVar[int] = 4
    rows: int
    """Rows left out at the start of every epoch."""

    def __post_init__(self) -> None:
        _make_whole(self, "rows", at_least=0, at_most=2**62)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """An epoch is several passes."""

    verb: ClassVar[str] = "repeat"
    level: ClassVar[int] = 4
    times: int
    """Passes in an epoch; each is shuffled anew."""

    def __post_init__(self) -> None:
        _make_whole(self, "times", at_least=1, at_most=2**40)


@dataclass(frozen=True, slots=True, kw_only=True)
class Map:
    """A function of each row, or of each batch of rows."""

    verb: ClassVar[str] = "map"
    level: ClassVar[int] = 5
    function: Callable[..., Any]
    batched: bool = False
    """Give the function a whole batch, as arrays, instead of one row."""
    ragged: tuple[str, ...] = ()
    """Columns that are `Ragged` in every batch, also where their rows happen to be of one length."""
    on_error: OnError = "raise"
    """"skip" puts another row of the epoch where the function fails, always the same one, and counts it."""

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"map({self.function!r}): a function is needed.")
        _check_names(self, "ragged")
        _check_choice(self, "on_error", OnError)
        if self.on_error == "skip" and self.batched:
            raise ValueError("map(on_error='skip', batched=True): only a function of single rows can be given another.")
        if self.ragged and self.batched:
            raise ValueError("map(ragged=..., batched=True): a function of a batch returns `Ragged` columns itself.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Cut the endless sequence of rows into batches."""

    verb: ClassVar[str] = "batch"
    level: ClassVar[int] = 6
    global_size: int
    """Rows per step over all ranks."""
    tail: Tail = "carry"
    """What becomes of an epoch's last rows: "carry" lets a batch span two epochs; "short" gives a
    smaller batch, and some ranks none of it; "even" gives a smaller batch with as many rows for every rank, one at
    least, by repeating some and marking them; "pad" repeats rows up to a full batch, and hides their labels; "drop"
    leaves them out and counts them."""

    def __post_init__(self) -> None:
        _make_whole(self, "global_size", at_least=1, at_most=2**40)
        _check_choice(self, "tail", Tail)


Stage = Cast | Weighted | Balanced | Shuffle | Window | Pack | Pad | TakeRows | Skip | Repeat | Map | Batch


LEGAL_ORDER = (
    "select_columns, cast -> sample or balance -> shuffle -> window, pack or pad -> (mix) -> take, skip, repeat -> "
    "map, map, ... -> batch"
)
_REPEATABLE = (Cast, TakeRows, Skip, Repeat, Map)


def check_next(stages: Sequence[Stage], stage: Stage) -> None:
    """Refuse a stage that cannot follow those before it.

    Raises:
        StageError: out of order, or a second one of a kind that may be there only once.
    """
    last = stages[-1] if stages else None
    if last is not None and (
        stage.level < last.level or (stage.level == last.level and not isinstance(stage, _REPEATABLE))
    ):
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
    "sample": ("weights", "rows", "replacement"),
    "balance": ("column", "rows", "replacement"),
    "pad": ("column", "bucket", "run"),
    "shuffle": ("seed", "mode", "group"),
    "window": ("length", "column"),
    "pack": ("length", "long", "max_documents", "column"),
    "take": ("rows", "tokens"),
    "skip": ("rows",),
    "repeat": ("times",),
}
"""The settings that decide the order of rows; the others only decide what a row looks like."""


def order_facts(stages: Sequence[Stage]) -> dict[str, str]:
    """The settings that decide which documents are row i of epoch e, stage by stage, short enough for a state."""
    facts: dict[str, str] = {}
    for stage in with_groups(stages):
        if stage.verb in _DECIDING:
            settings = dataclasses.asdict(stage)
            settings |= settings.pop("settings", {})
            told = ", ".join(f"{name}={settings[name]!r}" for name in _DECIDING[stage.verb])
            facts[stage.verb] = f"{facts[stage.verb]}; {told}" if stage.verb in facts else told
    return facts


def stage_identity(stage: Stage) -> Any:
    """JSON of a stage's settings."""
    if isinstance(stage, Map):
        ragged = [sorted(stage.ragged)] if stage.ragged else []
        skips = ["skip"] if stage.on_error == "skip" else []
        return ["map", function_identity(stage.function), stage.batched, *ragged, *skips]
    settings = dataclasses.asdict(stage)
    if isinstance(stage, Pack) and not stage.keep:
        del settings["keep"]  # plans from before there was one keep their fingerprints
    if isinstance(stage, Weighted) and isinstance(stage.weights, SampleWeights):
        settings["weights"] = [stage.weights.identity]
    return [stage.verb, settings]


def describe_stage(stage: Stage) -> str:
    """A stage as it was written."""
    if isinstance(stage, Map):
        name = getattr(stage.function, "__qualname__", repr(stage.function))
        ragged = f", ragged={list(stage.ragged)!r}" if stage.ragged else ""
        skips = ", on_error='skip'" if stage.on_error == "skip" else ""
        return f"map({name}{', batched=True' if stage.batched else ''}{ragged}{skips})"
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


def stage_json(stage: Stage) -> dict[str, Any]:
    """A stage in a plan file; `ValueError` for what a file cannot hold."""
    arguments: dict[str, Any] = {"dtypes": dict(stage.dtypes)} if isinstance(stage, Cast) else stage_arguments(stage)
    if isinstance(arguments.get("weights"), SampleWeights):
        raise ValueError("A plan over sample(weights=<an array>) holds a number per sample; make them a column first.")
    if isinstance(stage, Map):
        arguments["function"] = importable_name(stage.function)
    return {"verb": stage.verb, **arguments}


def _advice(stage: Stage, last: Stage) -> str:
    if isinstance(stage, (Pack, Pad, Window)) and isinstance(last, Map):
        return " Lengths must come from the index: do what the map does when the data is prepared."
    return ""

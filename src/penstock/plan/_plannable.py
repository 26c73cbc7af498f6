"""What a plan is built on, and from stages to rows: the row source that a dataset's stages describe."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from penstock.dataset import Samples, packed_column
from penstock.errors import StageError
from penstock.plan._pack_cache import find_pack_index
from penstock.plan._packed_rows import PackedRows
from penstock.plan._rows import RowSource
from penstock.plan._rules import with_groups
from penstock.plan._sample_orders import make_order
from penstock.plan._sample_rows import PaddedRows, SampleRows
from penstock.plan._stages import Balanced, Cast, Pack, Pad, Shuffle, Stage, Weighted, Window
from penstock.plan._token_window_rows import TokenWindowRows

Stages = tuple[Stage, ...]


class Plannable(Protocol):
    """What a plan is built on: a `Dataset`, or the `Mix` of several plans."""

    @property
    def fingerprint(self) -> str:
        """Identity of the data."""
        ...

    @property
    def tokenizers(self) -> dict[str, str]:
        """The tokenizers whose tokens it holds, as far as it says: name by digest."""
        ...

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes in the order of their labels, as far as it says."""
        ...

    def build_rows(self, stages: Stages) -> RowSource:
        """The rows that these stages make of it."""
        ...

    def check_stage(self, stage: Stage) -> None:
        """Raise `StageError` for a stage that cannot follow it."""
        ...

    def select_columns(self, names: Iterable[str]) -> Plannable:
        """The same samples with only these columns."""
        ...

    def map_seed(self, stages: Stages) -> int:
        """What the generators of mapped functions derive from."""
        ...

    def order_facts(self, stages: Stages) -> dict[str, str]:
        """What decides the order of rows, fact by fact."""
        ...

    def to_json(self) -> dict[str, Any]:
        """The source in a plan file; `ValueError` when a file cannot name it."""
        ...


def build_rows(samples: Samples, stages: Stages) -> RowSource:
    """The row source that stages describe.

    Raises:
        SchemaError: a column does not fit its stage.
        StageError: a stage that has no effect, or no meaning, before window(), pack() or pad().
    """
    stages = with_groups(stages)
    casts = tuple(stage for stage in stages if isinstance(stage, Cast))
    cut = next((stage for stage in stages if isinstance(stage, (Window, Pack, Pad))), None)
    if cut is None:
        return SampleRows(samples, casts, make_order(samples, samples.schema.columns, stages))
    if casts:
        raise StageError(f"cast() has no effect before {cut.verb}(): its rows are int64 already. Leave it out.")
    if isinstance(cut, Pad):
        return PaddedRows(samples, cut, make_order(samples, (samples.schema[cut.column],), stages))
    _refuse_draws(stages, cut)
    shuffle = _find_shuffle(stages)
    return TokenWindowRows(samples, cut, shuffle) if isinstance(cut, Window) else _pack(samples, cut, shuffle)


def map_seed(stages: Stages) -> int:
    """What the generators of mapped functions derive from: the seed of the shuffle, if there is one."""
    shuffle = _find_shuffle(stages)
    return 0 if shuffle is None else shuffle.seed


def _find_shuffle(stages: Stages) -> Shuffle | None:
    return next((stage for stage in stages if isinstance(stage, Shuffle)), None)


def _refuse_draws(stages: Stages, cut: Window | Pack) -> None:
    drawn = next((stage.verb for stage in stages if isinstance(stage, (Weighted, Balanced))), None)
    if drawn is not None:
        raise StageError(
            f"{cut.verb}() cannot follow {drawn}(): its rows, and how many there are, would differ between epochs. "
            "Use pad(), or give each kind of document its share with penstock.mix()."
        )


def _pack(samples: Samples, cut: Pack, shuffle: Shuffle | None) -> PackedRows:
    """Packed rows, whose number is looked up, or counted now."""
    column = packed_column(samples.schema, cut.column)
    index = find_pack_index(
        lambda begin, end: samples.lengths_between(column, begin, end),
        len(samples),
        cut.settings,
        column=cut.column,
        fingerprint=samples.fingerprint,
        attributes=samples.storage.attributes if samples.are_whole else {},
    )
    return PackedRows(samples, cut, shuffle, index)

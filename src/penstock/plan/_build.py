"""From stages to the row source they describe."""

from __future__ import annotations

from penstock.errors import StageError
from penstock.order import derive_key
from penstock.packing import PackIndex
from penstock.plan._dataset import Dataset
from penstock.plan._mix import Mix
from penstock.plan._pack_cache import find_pack_index
from penstock.plan._packed import PackedRows
from penstock.plan._rows import RowSource
from penstock.plan._sample_rows import SampleRows
from penstock.plan._stages import Cast, Pack, Shuffle, Stage, Window
from penstock.plan._token_columns import packed_column
from penstock.plan._window_rows import WindowRows


def build_rows(source: Dataset | Mix, stages: tuple[Stage, ...]) -> RowSource:
    """The row source that a plan reads from."""
    if isinstance(source, Mix):
        return source.rows()
    casts = tuple(stage for stage in stages if isinstance(stage, Cast))
    shuffle = next((stage for stage in stages if isinstance(stage, Shuffle)), None)
    cut = next((stage for stage in stages if isinstance(stage, (Window, Pack))), None)
    if cut is None:
        return SampleRows(source, casts, shuffle)
    if casts:
        raise StageError(f"cast() has no effect before {cut.verb}(): its rows are int64 already. Leave it out.")
    if isinstance(cut, Window):
        return WindowRows(source, cut, shuffle)
    return PackedRows(source, cut, shuffle, _pack_index(source, cut))


def seed_of(source: Dataset | Mix, stages: tuple[Stage, ...]) -> int:
    """What the generators of mapped functions derive from."""
    if isinstance(source, Mix):
        return derive_key(source.seed, "mix")
    return next((stage.seed for stage in stages if isinstance(stage, Shuffle)), 0)


def _pack_index(dataset: Dataset, stage: Pack) -> PackIndex:
    column = packed_column(dataset, stage.column)
    return find_pack_index(
        lambda begin, end: dataset.stored.lengths_between(column, begin, end),
        len(dataset),
        stage.settings,
        column=stage.column,
        fingerprint=dataset.rows_fingerprint,
        attributes=dataset.attributes if dataset.stored.are_whole else {},
    )

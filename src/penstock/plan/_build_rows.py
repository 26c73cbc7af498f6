"""From stages to rows: the row source that a dataset's stages describe."""

from __future__ import annotations

from penstock.errors import StageError
from penstock.plan._plannable import Stages
from penstock.rows import PackedRows, PaddedRows, RowSource, SampleRows, TokenWindowRows, find_pack_index, make_order
from penstock.samples import Samples, packed_column
from penstock.stages import Balanced, Cast, Pack, Pad, Shuffle, Weighted, Window, with_groups


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

"""Datasets and what is built on them: which samples, in which order, make which batch.

    Location + selections -> Samples -> Dataset                     _location, _samples, _dataset (_columns), _open
    several of them -> one Dataset; windows of one -> another       _concat, _join, _joined; _unfolded
    Dataset, or a Mix of plans, + stages -> Plan                    _stages, _draw_stages, _stage_rules, _verbs, _plan,
                                                                    _mix
        the stages decide the RowSource: what row i of the run is   _build_rows, _rows; _sample_rows, _padded_rows
                                                                    (_sample_orders, _bucketed); _token_window_rows,
                                                                    _packed_rows (_epochs); over any of these
                                                                    _mixed_rows, _mixed_pieces, _stretched_rows
        batch() decides the Steps: which rows are batch k           _steps
    plan.read(step) -> rows -> RowSource.read -> maps -> arrays     _reading; _compose, _compose_padded, _beside;
                                                                    _mapping, _replacing

A batch depends on the plan and the arguments of `read` alone; any thread or process gives the same one.

May import: `compiled`, `errors`, `filesystem`, `identity`, `order`, `packing`, `schema`, `shards`, `splitmix`. Imported
by: `cli`, `integrations`, `loader`, `placement`, `pytorch`, `service`, `trials`. Holds state: a packed plan keeps the
windows it packed last in memory (`_packed_blocks`), and row counts of large datasets are kept in the user's cache
folder (`_pack_cache`). Neither changes a batch.
"""

from penstock.plan._accounts import DocumentTrace, Ledger, Mixing, SourceLedger
from penstock.plan._concat import concat
from penstock.plan._dataset import Dataset
from penstock.plan._mapping import pure
from penstock.plan._mix import mix
from penstock.plan._open import from_arrays, open_dataset
from penstock.plan._plan import Plan
from penstock.plan._plan_file import load_plan
from penstock.plan._whole_batch import WholeBatch

__all__ = [
    "Dataset",
    "DocumentTrace",
    "Ledger",
    "Mixing",
    "Plan",
    "SourceLedger",
    "WholeBatch",
    "concat",
    "from_arrays",
    "load_plan",
    "mix",
    "open_dataset",
    "pure",
]

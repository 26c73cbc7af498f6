"""Datasets and plans: the verbs, and every batch as a pure function of a few numbers.

    Location -> Samples -> Dataset                                  _open, _dataset            (`samples`)
    Dataset, or a Mix of plans, + stages -> Plan                    _verbs, _plan, _mix        (`stages`)
        the stages decide the RowSource: what row i of the run is   _plannable                 (`rows`)
        batch() decides the Steps: which rows are batch k           _steps
    plan.read(step) -> rows -> RowSource.read -> maps -> arrays     _reading; _mapping, _row_results
    plan.save() <-> file; a batch as text                           _plan_file, _toml; _show

A batch depends on the plan and the arguments of `read` alone; any thread or process gives the same one.

May import: `errors`, `filesystem`, `identity`, `order`, `packing`, `rows`, `samples`, `schema`, `shards`, `stages`.
Imported by: `cli`, `integrations`, `loader`, `placement`, `pytorch`, `service`, `trials`. Holds no state.
"""

from penstock.plan._dataset import Dataset
from penstock.plan._mapping import pure
from penstock.plan._mix import mix
from penstock.plan._open import concat, from_arrays, open_dataset
from penstock.plan._plan import Plan
from penstock.plan._plan_file import load_plan
from penstock.plan._verbs import WholeBatch
from penstock.rows import DocumentTrace

__all__ = [
    "Dataset",
    "DocumentTrace",
    "Plan",
    "WholeBatch",
    "concat",
    "from_arrays",
    "load_plan",
    "mix",
    "open_dataset",
    "pure",
]

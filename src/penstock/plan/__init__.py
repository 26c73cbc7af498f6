"""Datasets and plans: the verbs, and every batch as a pure function of a few numbers.

    Location -> Samples -> Dataset                                  _open, _dataset            (room `dataset`)
    Dataset, or a Mix of plans, + stages -> Plan                    _verbs, _plan, _mix
        stages        frozen settings, checked when made; their legal order    _stages
        RowSource     what row i of the endless run is; other epochs of it     _rows
          which is next    order of an epoch; draws by weight and class        _epochs, _orders
          SampleRows       each sample                                         _sample_rows
          PaddedRows       one document each, documents of similar length together
          TokenWindowRows  fixed windows of all tokens
          PackedRows       whole documents side by side                        _packed_rows, _pack_index
          MixedRows        rows of several of these                            _mixed_rows
        Steps         which rows are batch k                                   _steps
        BudgetSteps   the same where a batch is as many rows as a budget holds  _budget
        Dealer        which rank gets which of them, by what they cost         _dealing
    plan.read(step) -> rows -> RowSource.read -> maps -> arrays     _reading; _compose, _kernels, _mapping
    plan.uses: which shards the next rows need, and when            _uses; `spans` and `reads` of orders and sources
    plan.egress: what nodes would fetch, by simulating their caches                     _egress
    plan.documents, plan.ledger, plan.mixing                        _accounts
    plan.to_toml() <-> load_plan; a batch as text                   _text, _open

A batch depends on the plan and the arguments of `read` alone; any thread or process gives the same one.

May import: `dataset`, `errors`, `filesystem`, `identity`, `native`, `order`, `packing`, `remote`, `report`,
`schema`, `shards`. Imported by: `cli`, `integrations`, `loader`, `pytorch`, `service`, `tuning`. Holds state: a
packed source keeps the windows it packed last in memory (`_packed_rows`), and row counts of large datasets are kept in
the user's cache folder (`_pack_index`). Neither changes a batch.
"""

from penstock.plan._accounts import DocumentTrace
from penstock.plan._dataset import Dataset
from penstock.plan._mapping import pure
from penstock.plan._mix import mix
from penstock.plan._open import concat, from_arrays, load_plan, open_dataset
from penstock.plan._plan import Plan
from penstock.plan._verbs import WholeBatch

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

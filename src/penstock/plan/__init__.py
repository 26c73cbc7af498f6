"""Datasets and what is built on them: which samples, in which order, make which batch.

Pure functions over shards: no threads, no torch.

May import: `compiled`, `errors`, `identity`, `order`, `packing`, `schema`, `shards`. Imported by: `cli`, `loader`,
`pytorch`. Holds state: row counts of packing, in the user's cache folder.
"""

from penstock.plan._dataset import Dataset
from penstock.plan._ledger import Ledger, SourceLedger
from penstock.plan._mapping import pure
from penstock.plan._mix import mix
from penstock.plan._open import from_arrays, open_dataset
from penstock.plan._plan import Plan
from penstock.plan._plan_file import load_plan
from penstock.plan._trace import DocumentTrace

__all__ = [
    "Dataset",
    "DocumentTrace",
    "Ledger",
    "Plan",
    "SourceLedger",
    "from_arrays",
    "load_plan",
    "mix",
    "open_dataset",
    "pure",
]

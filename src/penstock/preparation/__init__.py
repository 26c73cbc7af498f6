"""Raw data to a dataset, once: decide what is to be done, run it on processes or on Ray, commit it.

    sources -> tasks of about one shard -> read, transform, write, in any worker -> one commit

May import: `transforms`, `plan`, `shards`, `sources`, `order`, `packing`, and the lines under them. Imported by: `cli`.
"""

from penstock.preparation._prepare import prepare
from penstock.preparation._progress import Progress
from penstock.preparation._stale import Staleness, is_stale
from penstock.preparation._summary import Prepared
from penstock.preparation._unfinished import Unfinished, find_unfinished

__all__ = [
    "Prepared",
    "Progress",
    "Staleness",
    "Unfinished",
    "find_unfinished",
    "is_stale",
    "prepare",
]

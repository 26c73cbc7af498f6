"""Raw data to a dataset, once: decide what is to be done, run it on processes or on Ray, commit it.

    sources -> tasks of about one shard -> read, transform, write, in any worker -> one commit

May import: `errors`, `filesystem`, `identity`, `order`, `packing`, `schema`, `shards`, `sources`, `transforms`,
`workers`. Imported by: `cli`. Holds state: in a Ray worker, the job it has open.
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

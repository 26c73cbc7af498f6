"""Raw data to a dataset, once: decide, run, commit. Stop it at any moment; the next run continues.

    survey      list the sources, see what an earlier run left, read the first rows     only reads
    plan_run    Survey -> RunPlan: what is kept, finished, left to do, removed           a pure function
    run         each task: read -> transform -> write shards -> one record in .preparing  processes, Ray, or here
                with a shuffle in two passes: deal to random positions, then gather them in order
    commit      link the shards, write the manifest, rename it: now the dataset has changed

    to a URL    shards are sent as tasks finish; the folder that is prepared into keeps hollow ones   (`_shipping.py`)

May import: `dataset`, `errors`, `filesystem`, `identity`, `machine`, `order`, `packing`, `remote`, `report`, `schema`,
`shapes`, `shards`, `sources`, `transforms`, `workers`. Imported by: `cli`. Holds state: in a Ray worker, the job it has
open.
"""

from penstock.preparation._parts import part_of_recipe
from penstock.preparation._prepare import prepare
from penstock.preparation._prepared import Prepared
from penstock.preparation._previous import find_unfinished, is_stale
from penstock.preparation._progress import Progress

__all__ = [
    "Prepared",
    "Progress",
    "find_unfinished",
    "is_stale",
    "part_of_recipe",
    "prepare",
]

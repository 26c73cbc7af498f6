"""Raw data to a dataset, once: transforms, and the engine that runs them on processes or on Ray.

    sources -> tasks of about one shard -> read, transform, write, in any worker -> one commit

May import: `plan`, `shards`, `sources`, `order`, `packing`, and the lines under them. Imported by: `cli`.
"""

from penstock.errors import WorkerDied
from penstock.preparation._columns import KeepColumns
from penstock.preparation._functions import FunctionTransform
from penstock.preparation._images import DecodeImage
from penstock.preparation._prepare import prepare
from penstock.preparation._progress import Progress
from penstock.preparation._stale import Staleness, is_stale
from penstock.preparation._summary import Prepared
from penstock.preparation._tokenize import Tokenize
from penstock.preparation._transforms import OpenTransform, Output, Transform
from penstock.preparation._unfinished import Unfinished, find_unfinished

__all__ = [
    "DecodeImage",
    "FunctionTransform",
    "KeepColumns",
    "OpenTransform",
    "Output",
    "Prepared",
    "Progress",
    "Staleness",
    "Tokenize",
    "Transform",
    "Unfinished",
    "WorkerDied",
    "find_unfinished",
    "is_stale",
    "prepare",
]

"""XXH64 of many byte strings in one call: the published function (github.com/Cyan4973/xxHash), seed 0, in C."""

import numpy as np
from numpy.typing import NDArray

from penstock.native import ARRAY, kernel

_hash_spans = kernel("shards_hash_spans", ARRAY, ARRAY, ARRAY)


def hash_spans(data: NDArray[np.uint8], edges: NDArray[np.int64], out: NDArray[np.uint64]) -> None:
    """Hash of bytes `edges[k]` to `edges[k + 1]` of `data`, for each k."""
    _hash_spans(data, edges, out)

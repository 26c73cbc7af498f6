"""Which row comes next: keyed permutations, the order of an epoch, mixtures of sources, and parts of a split.

Pure integer arithmetic on int64 arrays. Knows nothing of files, threads or torch.
Kernels are compiled by numba at the first call.

May import: `compiled`, `splitmix`. Imported by: `plan`, `preparation`, `streams`. Holds no state.
"""

from penstock.order._keys import ORDER_VERSION, derive_key
from penstock.order._mixture import Mixture
from penstock.order._orders import FullOrder, Order, SequentialOrder
from penstock.order._parts import draw_shares, share_ranges
from penstock.order._permutation import Permutation
from penstock.order._windowed import WindowedOrder

__all__ = [
    "ORDER_VERSION",
    "FullOrder",
    "Mixture",
    "Order",
    "Permutation",
    "SequentialOrder",
    "WindowedOrder",
    "derive_key",
    "draw_shares",
    "share_ranges",
]

"""Which row comes next: keyed permutations, the order of an epoch, draws by weight, mixtures, and parts of a split.

Pure integer arithmetic on int64 arrays. Knows nothing of files, threads or torch.
Its loops are in C.

May import: `native`, `schema`, `splitmix`. Imported by: `dataset`, `plan`, `preparation`, `sources`.
Holds no state.
"""

from penstock.order._border import MAX_ROWS, ORDER_VERSION, derive_key, draw_shares, pick_numbers, share_ranges
from penstock.order._draw import ClassDeal, WeightedDraw
from penstock.order._lanes import LaneOrder
from penstock.order._mixture import BLOCK, STRATUM, Mixture, ScheduledMixture
from penstock.order._orders import FullOrder, Order, Permutation, SequentialOrder, WindowedOrder

__all__ = [
    "BLOCK",
    "MAX_ROWS",
    "ORDER_VERSION",
    "STRATUM",
    "ClassDeal",
    "FullOrder",
    "LaneOrder",
    "Mixture",
    "Order",
    "Permutation",
    "ScheduledMixture",
    "SequentialOrder",
    "WeightedDraw",
    "WindowedOrder",
    "derive_key",
    "draw_shares",
    "pick_numbers",
    "share_ranges",
]

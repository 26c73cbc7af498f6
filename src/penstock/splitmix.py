"""SplitMix64: from counters to words whose bits look random (Steele, Lea and Flood 2014; Stafford's mix 13).

For arrays and single words; `native/kernels.h` has the same function for loops in C.

May import: nothing. Imported by: `order`, `transforms`. Holds no state.
"""

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Words = TypeVar("Words", np.uint64, NDArray[np.uint64])

GAMMA = np.uint64(0x9E3779B97F4A7C15)
"""What the counter grows by."""
FACTOR_1, FACTOR_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def mix(word: Words) -> Words:
    """A bijection of 64-bit words, one or an array of them, in which every bit of the result depends on all bits."""
    bits: Any = word
    bits = (bits ^ (bits >> np.uint64(30))) * FACTOR_1
    bits = (bits ^ (bits >> np.uint64(27))) * FACTOR_2
    mixed: Words = bits ^ (bits >> np.uint64(31))
    return mixed

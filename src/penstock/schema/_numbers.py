"""Python's numbers as arrays, without numpy's rounding.

numpy has no integer type for -1 beside 2**63, so it makes floats of a list that holds an int64 and a larger integer:
`np.asarray([1, 2**63 + 5])` is `[1.0, 2.0**63]`. Hashes of 64 bits are such lists. It rounds large integers among
floats, too. Only floats beyond 2**53 can be rounded integers, so other lists cost no more than a comparison.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_FIRST_INEXACT = 2.0**53
_END_OF_UINT64 = 1 << 64


def exact_array(value: Any) -> NDArray[Any]:
    """The value as `np.asarray` gives it, but integers that it would round as uint64, or else as objects.

    >>> exact_array([1, 2**63 + 5]).tolist(), exact_array([-1, 2**63 + 5]).dtype
    ([1, 9223372036854775813], dtype('O'))
    """
    array = np.asarray(value)
    if array.dtype.kind != "f" or not isinstance(value, (list, tuple)) or not (np.abs(array) >= _FIRST_INEXACT).any():
        return array
    items = np.array(value, object)
    pairs = [pair for pair in zip(items.ravel().tolist(), array.ravel().tolist(), strict=True) if _is_whole(pair[0])]
    if len(pairs) == items.size and all(0 <= item < _END_OF_UINT64 for item, _ in pairs):
        return items.astype(np.uint64)
    return array if all(int(item) == number for item, number in pairs) else items


def _is_whole(item: Any) -> bool:
    return isinstance(item, (int, np.integer))


def common_dtype(arrays: list[NDArray[Any]]) -> np.dtype[Any]:
    """The dtype that holds all arrays: numpy's, but uint64 for integers that numpy would make floats of.

    >>> common_dtype([np.array([1]), np.array([2**63 + 5])])
    dtype('uint64')
    """
    dtype: np.dtype[Any] = np.result_type(*{array.dtype for array in arrays})
    is_whole = all(array.dtype.kind in "iub" for array in arrays)
    if dtype.kind == "f" and is_whole and not any((array < 0).any() for array in arrays):
        return np.dtype(np.uint64)
    return dtype

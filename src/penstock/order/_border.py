"""Where numbers from outside enter: integers become checked int64 arrays, seeds become keys, fractions become ranges.

**Arrays.** Callers pass any integers: a list, a slice, a 2-D array, a read-only view. The kernels take only one kind
of array. This module mediates: convert, allocate, call, and turn "place of the first bad index" into an IndexError.
Price: about 3 µs per call of any size.

**Keys.** Every permutation of a run needs its own 64-bit key: one per epoch, per mixture, per purpose. Adding small
numbers to a seed (`seed + epoch`) makes seed 7, epoch 1 repeat seed 8, epoch 0. Instead, the seed and all labels are
hashed together with BLAKE2b, each part preceded by its kind and its length, so that no two different lists of parts
give the same bytes. The result depends only on the arguments: not on the machine, the byte order or PYTHONHASHSEED.
Price: about 2 µs per key.

**Splits.** Which part of a split a sample is in is decided by a number from 0 to 1 that depends only on its own key and
the seed. So a sample stays in its part whatever is added, removed or moved around it, and a part whose range of numbers
grows keeps all the samples it had.
"""

import functools
import hashlib
from collections.abc import Callable, Mapping
from operator import index

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.order import _kernels
from penstock.splitmix import mix

Int64 = NDArray[np.int64]

ORDER_VERSION: int = 1
"""Part of every fingerprint of an order. Raise it with any change that moves even a single row."""
MAX_ROWS = 2**62
"""The largest domain: left and right halves of 31 bits, sums that stay inside int64."""


def checked_number(name: str, value: int, *, at_least: int = 0, at_most: int | None = None) -> int:
    """`value` as a Python int, or a ValueError (TypeError for a non-integer) that names it."""
    try:
        number = index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if number < at_least:
        raise ValueError(f"{name} must be at least {at_least:,}, got {number:,}")
    if at_most is not None and number > at_most:
        raise ValueError(f"{name} must be at most {at_most:,}, got {number:,}")
    return number


def as_int64(noun: str, numbers: ArrayLike) -> Int64:
    """`numbers` as a writable, contiguous int64 array: itself if it already is one."""
    given = np.asarray(numbers)
    if given.size and given.dtype.kind not in "iu":  # np.asarray([]) is float64
        raise TypeError(f"every {noun} must be an integer, got an array of {given.dtype}")
    return given.astype(np.int64, order="C", copy=not given.flags.writeable)


def checked_positions(positions: ArrayLike, size: int) -> Int64:
    """`positions` as int64, all of them in [0, size), or an IndexError naming the first that is not."""
    numbers = as_int64("position", positions)
    is_outside = (numbers < 0) | (numbers >= size)
    if is_outside.any():
        raise out_of_range("position", numbers[is_outside][0], size)
    return numbers


def checked_counts(rows_per_window: ArrayLike) -> Int64:
    """A private copy, so that the caller's later writes cannot change the order."""
    counts = as_int64("entry of rows_per_window", rows_per_window).copy()
    if counts.ndim != 1:
        raise ValueError(f"rows_per_window must have one dimension, got shape {counts.shape}")
    if counts.size and counts.min() < 0:
        worst = int(counts.argmin())
        raise ValueError(f"rows_per_window[{worst}] is {counts[worst]}: a window cannot hold fewer than 0 rows")
    if counts.sum(dtype=np.float64) > MAX_ROWS:  # the int64 sum may have wrapped around
        raise ValueError(f"rows_per_window add up to more than the {MAX_ROWS:,} rows that an order can have")
    return counts


def map_indices(kernel: Callable[..., int], noun: str, numbers: ArrayLike, size: int, *arguments: object) -> Int64:
    """The result of `kernel` for each of `numbers`, in an array of the same shape."""
    indices = as_int64(noun, numbers)
    out = np.empty(indices.shape, np.int64)
    flat = indices.reshape(-1)
    first_bad = kernel(flat, out.reshape(-1), size, *arguments)
    if first_bad >= 0:
        raise out_of_range(noun, flat[first_bad], size)
    return out


def out_of_range(noun: str, value: int, size: int) -> IndexError:
    """The error for an index that is not in [0, size)."""
    return IndexError(f"{noun} {value} is out of range: there are {size}, numbered from 0")


def derive_key(seed: int, *labels: int | str) -> int:
    """A key in [0, 2**64) that differs for every seed (of any size or sign) and list of labels.

    >>> derive_key(7, "rows", 0) == derive_key(7, "rows", 1)
    False
    """
    digest = hashlib.blake2b(digest_size=8, person=b"penstock.order")
    for part in (seed, *labels):
        digest.update(_encoded(part))
    return int.from_bytes(digest.digest(), "little")


def _encoded(part: int | str) -> bytes:
    if isinstance(part, str):
        kind, payload = b"s", part.encode()
    else:
        number = index(part)  # accepts numpy integers, too; refuses floats
        kind, payload = b"i", number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    return kind + len(payload).to_bytes(8, "little") + payload


def draw_shares(keys: NDArray[np.uint64], seed: int) -> NDArray[np.float64]:
    """A number from 0 to 1 for each key."""
    drawn: NDArray[np.float64] = mix(keys + np.uint64(derive_key(seed, "split by key"))) / 2.0**64
    return drawn


def pick_numbers(begin: int, end: int, seed: int, low: float, high: float) -> NDArray[np.int64]:
    """Those of the numbers `begin` to `end` for which a number from `low` up to `high`, of 0 to 1, is drawn."""
    found = np.empty(end - begin, np.int64)
    first, stop = _least_word(low), _least_word(high)
    if first >= stop:
        return found[:0]
    return found[: _kernels.pick(begin, end, derive_key(seed, "split"), first, stop - 1, found)]


@functools.cache
def _least_word(share: float) -> int:
    """The least 64-bit word that is at least this share of 2**64 when it is rounded to a float; 2**64 if none is."""
    low, high = 0, 1 << 64
    while low < high:
        middle = (low + high) // 2
        if float(middle) / 2.0**64 >= share:
            high = middle
        else:
            low = middle + 1
    return low


def share_ranges(fractions: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """The range of numbers of each part; together they cover every number exactly once.

    Raises:
        TypeError: the fractions have no names.
        ValueError: a fraction is not positive, or they do not add up to 1.

    >>> share_ranges({"train": 0.75, "val": 0.25})
    {'train': (0.0, 0.75), 'val': (0.75, 2.0)}
    """
    if not isinstance(fractions, Mapping):
        raise TypeError(f"Fractions must have names, as in {{'train': 0.9, 'test': 0.1}}; these are {fractions!r}.")
    if not fractions or any(not fraction > 0 for fraction in fractions.values()):
        raise ValueError(f"Fractions must be positive; these are {dict(fractions)}.")
    if abs(sum(fractions.values()) - 1) > 1e-6:
        raise ValueError(f"Fractions must add up to 1; {dict(fractions)} add up to {sum(fractions.values())}.")
    edges = np.concatenate([[0.0], np.cumsum(list(fractions.values()))]).tolist()
    edges[-1] = 2.0  # however rounding went, the last part takes the rest
    return {name: (edges[number], edges[number + 1]) for number, name in enumerate(fractions)}

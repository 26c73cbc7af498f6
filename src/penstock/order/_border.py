"""Where numbers from outside become checked int64 arrays, and kernels are called.

Callers pass any integers: a list, a slice, a 2-D array, a read-only view. The kernels take only one
kind of array, because numba compiles a new version (about a second) for every kind it sees.
This module mediates: convert, allocate, call, and turn "place of the first bad index" into an
IndexError. Price: about 3 µs per call of any size, including numba's own type checks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import index
from types import ModuleType

import numpy as np
from numpy.typing import ArrayLike, NDArray

Int64 = NDArray[np.int64]

MAX_ROWS = 2**62
"""The largest domain: left and right halves of 31 bits, sums that stay inside int64."""


@functools.cache
def kernels() -> ModuleType:
    """The compiled kernels; importing them imports numba."""
    from penstock.order import _kernels

    return _kernels


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

"""Document lengths are checked here, at the border of the room, and trusted everywhere inside.

After the policy for long documents is applied, one rule is left for the kernels: a document is cut into
pieces of `length` tokens and a remainder, and a document of no tokens has no piece.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.packing._settings import PackingSettings


def check_lengths(lengths: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """The lengths as contiguous int64, copied only if they are not.

    Raises:
        TypeError: not a numpy array of integers.
        ValueError: not one-dimensional, a negative length, or more tokens in total than 64 bits can count.
    """
    # Callers without a type checker may pass anything.
    found: object = lengths
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "iu":
        kind = f"{found.dtype} array" if isinstance(found, np.ndarray) else type(found).__name__
        raise TypeError(f"lengths must be a numpy array of integers, got {kind}")
    if lengths.ndim != 1:
        raise ValueError(f"lengths must have one dimension, got shape {lengths.shape}")
    checked = np.ascontiguousarray(lengths, dtype=np.int64)
    if checked.size:
        _check_range(lengths, checked)
    return checked


def _check_range(lengths: npt.NDArray[np.integer], checked: npt.NDArray[np.int64]) -> None:
    # An unsigned length over 2**63 became negative in the cast, so one comparison finds both errors.
    if checked.min() < 0:
        index = int(checked.argmin())
        raise ValueError(f"lengths[{index}] is {lengths[index]}; a document has 0 to 2**63 - 1 tokens")
    # The product bounds the sum and cannot itself overflow in Python.
    if int(checked.max()) * checked.size >= 2**63:
        index = int(checked.argmax())
        raise ValueError(
            f"lengths[{index}] is {lengths[index]:,}; {checked.size:,} documents of that size "
            f"are more tokens than 64 bits can count. Are these byte offsets rather than lengths?"
        )


def apply_long_policy(lengths: npt.NDArray[np.int64], settings: PackingSettings) -> npt.NDArray[np.int64]:
    """How many tokens of each document go into rows; "split" keeps them all, without a copy."""
    match settings.long:
        case "split":
            return lengths
        case "truncate":
            return np.minimum(lengths, settings.length)
        case "drop":
            return np.where(lengths <= settings.length, lengths, 0)

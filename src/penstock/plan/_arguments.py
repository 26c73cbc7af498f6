"""What people pass, checked and made plain: one kind of number and one kind of dtype, for fingerprints and files."""

from __future__ import annotations

import operator

import numpy as np
from numpy.typing import DTypeLike

from penstock.schema import dtype_from_name, dtype_name


def whole_number(
    verb: str, name: str, value: object, *, at_least: int | None = None, at_most: int | None = None
) -> int:
    """`value` as a Python int, also when it is numpy's or torch's.

    Raises:
        TypeError: it is no integer, or a bool.
        ValueError: it is out of range.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{verb}({name}={value!r}): the {name} must be an int, not {type(value).__name__}.")
    if (at_least is not None and number < at_least) or (at_most is not None and number > at_most):
        upper = f" and at most {at_most:,}" if at_most is not None else ""
        raise ValueError(f"{verb}({name}={number}): the {name} must be at least {at_least:,}{upper}.")
    return number


def name_of_dtype(dtype: DTypeLike) -> str:
    """Name of a dtype given as text, which may be one that numpy itself does not know, or as numpy's own."""
    return dtype_name(dtype_from_name(dtype) if isinstance(dtype, str) else np.dtype(dtype))

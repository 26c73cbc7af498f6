"""Numbers of Python as arrays that hold exactly them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.schema import common_dtype, exact_array

LARGE = 2**63 + 5


@given(st.lists(st.one_of(st.integers(-(2**65), 2**65), st.floats()), max_size=4))
@example([1, LARGE])
@example([1.5, 2**53 + 1])
@example([float("nan"), 2**53 + 1])
@example([2**60, 1.5])
def test_no_number_of_a_list_is_rounded(values: list[Any]) -> None:
    array = exact_array(values)
    assert all(new == old or old != old for new, old in zip(array.tolist(), values, strict=True))


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        ([1, LARGE], "uint64"),
        ([[1, 2], [3, LARGE]], "uint64"),
        ((np.int64(1), np.uint64(LARGE)), "uint64"),
        ([1.5, 2**60], "float64"),
        ([1e300, float("nan")], "float64"),
        ([-1, LARGE], "object"),
        ([0.5, LARGE], "object"),
        ([1, 2], "int64"),
        (np.array([1e300, 0.1], np.float64), "float64"),
    ],
)
def test_large_integers_are_uint64_or_objects_and_everything_else_is_numpys(value: Any, dtype: str) -> None:
    array = exact_array(value)
    assert array.dtype == dtype
    assert array.shape == np.asarray(value).shape


def test_integers_of_several_arrays_have_an_integer_dtype_if_there_is_one() -> None:
    assert common_dtype([np.array([1]), np.array([LARGE])]) == np.uint64
    assert common_dtype([np.array([-1]), np.array([LARGE])]) == np.float64
    assert common_dtype([np.array([1], np.int8), np.array([300], np.int16)]) == np.int16
    assert common_dtype([np.array([1]), np.array([0.5])]) == np.float64

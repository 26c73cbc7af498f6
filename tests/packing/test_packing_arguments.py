"""Wrong arguments are refused before anything is packed, in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from penstock.packing import PackingSettings, count_rows, make_ledger, pack

SETTINGS = PackingSettings(length=8)


def pack_with_key_0(lengths: Any, settings: PackingSettings) -> object:
    return pack(lengths, settings, key=0)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"length": 0}, ValueError, r"length must be from 1 to 16,777,216, got 0"),
        ({"length": -4096}, ValueError, r"length must be from 1 to 16,777,216, got -4,096"),
        ({"length": 2**24 + 1}, ValueError, r"length must be from 1 to 16,777,216, got 16,777,217"),
        ({"length": 4096.0}, TypeError, r"length must be an int, got 4096.0 of type float"),
        ({"length": True}, TypeError, r"length must be an int, got True of type bool"),
        ({"length": 8, "max_documents": 0}, ValueError, r"max_documents must be at least 1, got 0"),
        (
            {"length": 8, "max_documents": "4"},
            TypeError,
            r"max_documents must be an int, got '4' of type str",
        ),
        (
            {"length": 8, "long": "cut"},
            ValueError,
            r"long must be one of 'split', 'truncate', 'drop', got 'cut'",
        ),
    ],
)
def test_settings_name_the_field_the_value_and_what_is_expected(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        PackingSettings(**arguments)


@pytest.mark.parametrize("function", [count_rows, make_ledger, pack_with_key_0])
@pytest.mark.parametrize(
    ("lengths", "error", "message"),
    [
        ([3, 4], TypeError, r"lengths must be a numpy array of integers, got list"),
        (np.array([3.0]), TypeError, r"lengths must be a numpy array of integers, got float64 array"),
        (np.array([True]), TypeError, r"lengths must be a numpy array of integers, got bool array"),
        (np.array([[3]]), ValueError, r"lengths must have one dimension, got shape \(1, 1\)"),
        (np.array([3, -2]), ValueError, r"lengths\[1\] is -2; a document has 0 to 2\*\*63 - 1 tokens"),
        (np.array([2**64 - 1], np.uint64), ValueError, r"lengths\[0\] is 18446744073709551615"),
        (np.array([1, 2**62]), ValueError, r"more tokens than 64 bits can count"),
    ],
)
def test_lengths_are_refused_by_every_function_alike(
    function: Callable[[Any, PackingSettings], object], lengths: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        function(lengths, SETTINGS)


@pytest.mark.parametrize(
    ("key", "error", "message"),
    [
        (-1, ValueError, r"key must be from 0 to 2\*\*64 - 1, got -1"),
        (2**64, ValueError, r"key must be from 0 to 2\*\*64 - 1, got 18446744073709551616"),
        ("seed", TypeError, r"key must be an int, got 'seed' of type str"),
    ],
)
def test_keys_are_64_bits(key: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pack(np.array([3]), SETTINGS, key)


def test_more_pieces_than_can_be_numbered_are_refused_before_memory_is_taken() -> None:
    with pytest.raises(ValueError, match=r"2,147,483,648 pieces of at most 1 tokens"):
        pack(np.array([2**31]), PackingSettings(length=1), key=0)


def test_rows_of_more_pieces_than_can_be_packed_at_once_can_still_be_counted() -> None:
    assert count_rows(np.array([2**40, 2**31 + 3]), PackingSettings(length=8)) == 2**37 + 2**28 + 1


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        SETTINGS.length = 9  # type: ignore[misc]


def test_integers_of_numpy_become_plain_ones() -> None:
    settings = PackingSettings(length=np.uint16(8), max_documents=np.int64(2))  # type: ignore[arg-type]
    assert settings == PackingSettings(length=8, max_documents=2)
    assert type(settings.length) is type(settings.max_documents) is int

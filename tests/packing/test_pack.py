"""Laws of a packing, for any lengths, settings and key; and adversarial lengths by name."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from penstock.packing import PACKING_VERSION, PackingSettings, count_rows, pack

from .examples import (
    Lengths,
    best_fit_decreasing,
    cases,
    count_uses,
    draw_web_lengths,
    kept_tokens,
    keys,
    law,
    tokens_per_row,
)

Case = tuple[Lengths, PackingSettings]


@law
@given(cases(), keys)
def test_every_kept_token_is_placed_exactly_once_and_no_other_token_is(case: Case, key: int) -> None:
    lengths, settings = case
    uses = count_uses(pack(lengths, settings, key), lengths)
    place_in_document = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    is_kept = place_in_document < np.repeat(kept_tokens(lengths, settings), lengths)
    np.testing.assert_array_equal(uses, is_kept.astype(np.int64))


@law
@given(cases(), keys)
def test_no_row_is_empty_or_over_its_length_or_over_its_documents(case: Case, key: int) -> None:
    lengths, settings = case
    packing = pack(lengths, settings, key)
    row_tokens, row_pieces = tokens_per_row(packing), np.diff(packing.row_offsets)
    assert np.all((row_tokens >= 1) & (row_tokens <= settings.length))
    assert np.all((row_pieces >= 1) & (row_pieces <= (settings.max_documents or packing.num_pieces)))
    assert np.all(packing.lengths >= 1)


@law
@given(cases(), keys)
def test_a_row_never_holds_two_pieces_of_one_document(case: Case, key: int) -> None:
    packing = pack(*case, key)
    rows = np.repeat(np.arange(packing.num_rows), np.diff(packing.row_offsets))
    in_row_and_document = np.lexsort((packing.documents, rows))
    is_same_row = np.diff(rows[in_row_and_document]) == 0
    is_same_document = np.diff(packing.documents[in_row_and_document]) == 0
    assert not np.any(is_same_row & is_same_document)


@law
@given(cases(), keys)
def test_counting_gives_the_rows_that_packing_makes_whatever_the_key(case: Case, key: int) -> None:
    assert count_rows(*case) == pack(*case, key).num_rows == pack(*case, key=0).num_rows


@law
@given(cases(), keys)
def test_the_order_of_documents_does_not_change_the_number_of_rows(case: Case, key: int) -> None:
    lengths, settings = case
    shuffled = np.random.default_rng(key).permutation(lengths)
    assert count_rows(shuffled, settings) == count_rows(lengths, settings)
    assert pack(shuffled, settings, key).num_rows == count_rows(lengths, settings)


@law
@given(cases())
def test_rows_are_as_many_as_a_plain_best_fit_decreasing_makes(case: Case) -> None:
    assert count_rows(*case) == best_fit_decreasing(*case)


@law
@given(cases(), keys)
def test_the_same_arguments_give_the_same_packing(case: Case, key: int) -> None:
    first, second = pack(*case, key), pack(*case, key)
    for name in ("row_offsets", "documents", "starts", "lengths"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


@pytest.mark.parametrize("length", [300, 5000, 70_000])
def test_counting_and_packing_agree_with_plain_best_fit_on_web_lengths(length: int) -> None:
    lengths, settings = draw_web_lengths(600_000, seed=length), PackingSettings(length=length)
    assert count_rows(lengths, settings) == pack(lengths, settings, 1).num_rows
    assert count_rows(lengths, settings) == best_fit_decreasing(lengths, settings)


@pytest.mark.parametrize(
    ("lengths", "length", "num_rows"),
    [
        pytest.param([5] * 1000, 16, 334, id="all equal: three fit a row"),
        pytest.param([16] * 1000, 16, 1000, id="all exactly a row"),
        pytest.param([1] * 1000, 16, 63, id="all of one token"),
        pytest.param([17] * 1000, 16, 1063, id="all one token over a row: the remainders share rows"),
        pytest.param([9] * 1000, 16, 1000, id="all just over half a row"),
        pytest.param([1_000_000], 16, 62_500, id="one huge document"),
        pytest.param([3, 4], 16, 1, id="less than a row"),
        pytest.param([0, 0, 0], 16, 0, id="only empty documents"),
        pytest.param([], 16, 0, id="no documents"),
        pytest.param([3, 0, 1], 1, 4, id="rows of one token"),
    ],
)
def test_adversarial_lengths_lose_nothing(lengths: list[int], length: int, num_rows: int) -> None:
    documents, settings = np.array(lengths, dtype=np.int64), PackingSettings(length=length)
    packing = pack(documents, settings, key=3)
    assert count_rows(documents, settings) == packing.num_rows == num_rows
    assert np.all(count_uses(packing, documents) == 1)
    assert np.all(tokens_per_row(packing) <= length)


def test_rows_full_in_count_take_no_more_documents() -> None:
    settings = PackingSettings(length=100, max_documents=3)
    packing = pack(np.full(30, 2), settings, key=0)
    assert np.diff(packing.row_offsets).tolist() == [3] * 10


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
def test_every_integer_dtype_packs_alike(dtype: type[np.integer]) -> None:
    lengths, settings = np.array([3, 5, 2, 9, 0, 8, 2, 3, 17, 1]), PackingSettings(length=8)
    expected, found = pack(lengths, settings, 7), pack(lengths.astype(dtype), settings, 7)
    np.testing.assert_array_equal(found.documents, expected.documents)


def test_a_strided_read_only_view_packs_like_a_copy() -> None:
    table = np.arange(60).reshape(20, 3)
    table.setflags(write=False)
    settings = PackingSettings(length=32)
    expected, found = pack(table[:, 1].copy(), settings, 7), pack(table[:, 1], settings, 7)
    np.testing.assert_array_equal(found.documents, expected.documents)


def test_the_packing_of_version_1_is_pinned() -> None:
    packing = pack(np.array([3, 5, 2, 9, 0, 8, 2, 3, 17, 1]), PackingSettings(length=8), key=7)
    assert packing.row_offsets.tolist() == [0, 1, 2, 3, 4, 6, 10, 12]
    assert packing.documents.tolist() == [3, 8, 8, 5, 1, 7, 2, 0, 6, 3, 8, 9]
    assert packing.starts.tolist() == [0, 8, 0, 0, 0, 0, 0, 0, 0, 8, 16, 0]
    assert packing.lengths.tolist() == [8, 8, 8, 8, 5, 3, 2, 3, 2, 1, 1, 1]
    assert PACKING_VERSION == 1, "other values above mean another version: runs in flight resume by it"


def test_arrays_have_the_stated_dtypes_even_when_empty() -> None:
    packing = pack(np.zeros(0, np.int64), PackingSettings(length=8), key=0)
    assert packing.row_offsets.tolist() == [0]
    assert packing.row_offsets.dtype == packing.documents.dtype == packing.starts.dtype == np.int64
    assert packing.lengths.dtype == np.int32

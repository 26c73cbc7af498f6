"""What the key redraws: which documents of equal length go where, and the order inside a row."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import numpy.typing as npt
import pytest

from penstock.packing import Packing, PackingSettings, count_rows, pack

from .examples import draw_web_lengths


def list_neighbours(packing: Packing, distance: int) -> npt.NDArray[np.int64]:
    """Documents so many pieces apart in one row, as one number per pair."""
    rows = np.repeat(np.arange(packing.num_rows), np.diff(packing.row_offsets))
    is_shared = rows[distance:] == rows[:-distance]
    one, other = packing.documents[distance:][is_shared], packing.documents[:-distance][is_shared]
    pairs: npt.NDArray[np.int64] = np.maximum(one, other) << 32 | np.minimum(one, other)
    return pairs


def list_row_mates(packing: Packing) -> npt.NDArray[np.int64]:
    """Every two documents that share a row, as one number per pair."""
    distances = range(1, int(np.diff(packing.row_offsets).max()))
    return np.concatenate([list_neighbours(packing, distance) for distance in distances])


@pytest.mark.parametrize("length", [2048, 4096, 8192])
def test_under_a_twentieth_of_the_neighbours_of_one_key_are_neighbours_with_another(length: int) -> None:
    lengths, settings = draw_web_lengths(16_384 * length, seed=1), PackingSettings(length=length)
    first, second = (list_neighbours(pack(lengths, settings, key), distance=1) for key in (0, 1))
    assert 0.0 < np.isin(first, second).mean() < 0.05


@pytest.mark.parametrize(("length", "most"), [(2048, 0.16), (4096, 0.23)])
def test_most_documents_that_share_a_row_are_parted_by_another_key(length: int, most: float) -> None:
    # Not fewer: best fit fills whole rows with short documents of one length, and their kind is small.
    lengths, settings = draw_web_lengths(16_384 * length, seed=1), PackingSettings(length=length)
    first, second = (list_row_mates(pack(lengths, settings, key)) for key in (0, 1))
    assert 0.0 < np.isin(first, second).mean() < most


def list_rows(packing: Packing) -> list[tuple[int, ...]]:
    ends = packing.row_offsets[1:].tolist()
    starts = packing.row_offsets[:-1].tolist()
    return [tuple(sorted(packing.documents[a:b].tolist())) for a, b in zip(starts, ends, strict=True)]


def test_under_a_twentieth_of_shared_rows_come_back_whole() -> None:
    lengths, settings = draw_web_lengths(16_384 * 4096, seed=1), PackingSettings(length=4096)
    first, second = (list_rows(pack(lengths, settings, key)) for key in (0, 1))
    shared, known = [row for row in first if len(row) > 1], set(second)
    assert sum(row in known for row in shared) < len(shared) / 20


def test_keys_share_the_layout_so_each_row_has_the_same_lengths() -> None:
    lengths, settings = draw_web_lengths(100_000, seed=2), PackingSettings(length=1000)
    first, second = pack(lengths, settings, 0), pack(lengths, settings, 2**64 - 1)
    np.testing.assert_array_equal(first.row_offsets, second.row_offsets)
    assert first.num_rows == count_rows(lengths, settings)
    rows = np.repeat(np.arange(first.num_rows), np.diff(first.row_offsets))
    one, other = (packing.lengths[np.lexsort((packing.lengths, rows))] for packing in (first, second))
    np.testing.assert_array_equal(one, other)


def count_orders(lengths: list[int], length: int, num_keys: int) -> list[int]:
    orders = dict.fromkeys(permutations(range(len(lengths))), 0)
    for key in range(num_keys):
        packing = pack(np.array(lengths), PackingSettings(length=length), key)
        orders[tuple(packing.documents.tolist())] += 1
    return list(orders.values())


@pytest.mark.parametrize(
    ("lengths", "length"),
    [
        pytest.param([1, 2, 5], 8, id="different lengths in one row"),
        pytest.param([4, 4, 4], 4, id="equal lengths in a row each"),
        pytest.param([2, 2, 2], 6, id="equal lengths in one row"),
    ],
)
def test_neighbouring_keys_draw_every_order_equally_often(lengths: list[int], length: int) -> None:
    # 3,000 draws of 6 orders: 500 each, standard deviation 20; five of those on either side.
    counts = count_orders(lengths, length, num_keys=3000)
    assert all(400 <= count <= 600 for count in counts)


def test_the_longer_of_two_pieces_comes_first_in_half_of_the_rows() -> None:
    lengths = np.concatenate([np.full(20_000, 6), np.full(20_000, 2)])
    packing = pack(lengths, PackingSettings(length=8), key=5)
    # Standard deviation of the share over 20,000 rows: 0.0035.
    assert abs(np.mean(packing.lengths[::2] == 6) - 0.5) < 0.018


def test_a_document_dealt_to_a_row_says_nothing_of_where_it_lies_in_it() -> None:
    lengths = np.full(20_000, 4)
    packing = pack(lengths, PackingSettings(length=8), key=5)
    assert abs(np.mean(packing.documents[::2] < packing.documents[1::2]) - 0.5) < 0.025
    assert abs(np.corrcoef(packing.documents, np.arange(20_000))[0, 1]) < 0.035

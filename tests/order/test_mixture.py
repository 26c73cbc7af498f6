"""A mixture is exact in every block, close in every stretch, a bijection, and without a pattern."""

import math
import pickle

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.order import Mixture

BLOCK, STRATUM = 65_536, 32

weights = st.lists(st.floats(0.1, 100), min_size=1, max_size=12)
seeds = st.integers(-(2**80), 2**80)
HARD_WEIGHTS = [[1, 1], [65_535, 1], [0.5, 0.3, 0.2], [1] * 7, [1000, 1, 1, 1], [1 / 3, 2 / 3], [5] * 300]


def deviations(mixture: Mixture, source: int, rows: np.ndarray) -> np.ndarray:
    """Rows of the source among the first m, less m times its share, for each m."""
    counts = np.concatenate([[0], np.cumsum(mixture.sources(rows) == source)])
    return counts - np.arange(rows.size + 1) * (mixture.quotas[source] / BLOCK)


def row_of(mixture: Mixture, source: int, position: int) -> int:
    """The row in which a position of a source comes, found among all rows of its block."""
    rows = position // mixture.quotas[source] * BLOCK + np.arange(BLOCK)
    sources, positions = mixture.locate(rows)
    (row,) = rows[(sources == source) & (positions == position)].tolist()
    return row


# Proportions


@given(weights)
@settings(deadline=None)
def test_quotas_fill_a_block_and_are_less_than_one_row_off(some):
    quotas = Mixture(some, seed=0).quotas
    assert sum(quotas) == BLOCK
    assert all(abs(q - BLOCK * w / math.fsum(some)) < 1 for q, w in zip(quotas, some, strict=True))


@given(weights, seeds, st.integers(0, 2**40))
@example([65_535, 1], 7, 0)
@settings(max_examples=20, deadline=None)
def test_every_block_holds_exactly_the_quotas(some, seed, block):
    mixture = Mixture(some, seed)
    sources = mixture.sources(np.arange(block * BLOCK, (block + 1) * BLOCK))
    assert tuple(np.bincount(sources, minlength=len(some)).tolist()) == mixture.quotas


@given(weights, seeds)
@settings(max_examples=15, deadline=None)
def test_no_stretch_is_off_by_more_than_the_stated_bound(some, seed):
    """Every one of the 2**33 stretches in two blocks: the widest gap between any two deviations."""
    assert_bound_holds(Mixture(some, seed))


@pytest.mark.parametrize("some", HARD_WEIGHTS, ids=lambda some: f"{len(some)}x{some[0]:.3g}")
def test_the_bound_holds_for_weights_that_are_hard_to_spread(some):
    assert_bound_holds(Mixture(some, seed=7))


def assert_bound_holds(mixture: Mixture) -> None:
    for source in list(range(len(mixture.quotas)))[:12]:
        share = mixture.quotas[source] / BLOCK
        bound = 1 + STRATUM * share * (1 - share)
        gaps = deviations(mixture, source, np.arange(2 * BLOCK))
        assert np.abs(gaps).max() < bound
        assert gaps.max() - gaps.min() < 2 * bound
        assert np.abs(gaps[::STRATUM]).max() < 1


@given(weights, seeds, st.integers(0, 2**50))
@settings(max_examples=25, deadline=None)
def test_counts_are_what_counting_gives(some, seed, num_rows):
    mixture = Mixture(some, seed)
    block = num_rows - num_rows % BLOCK
    in_block = np.bincount(mixture.sources(np.arange(block, num_rows)), minlength=len(some))
    expected = np.array(mixture.quotas) * (block // BLOCK) + in_block
    assert mixture.counts(num_rows).tolist() == expected.tolist()


# Positions


@given(weights, seeds)
@settings(max_examples=15, deadline=None)
def test_each_position_of_each_source_comes_exactly_once(some, seed):
    mixture = Mixture(some, seed)
    sources, positions = mixture.locate(np.arange(3 * BLOCK))
    for source, quota in enumerate(mixture.quotas):
        assert (np.bincount(positions[sources == source], minlength=3 * quota) == 1).all()


@given(weights, seeds, st.integers(0, 2**40))
@settings(max_examples=15, deadline=None)
def test_a_block_holds_consecutive_positions_in_order_from_stratum_to_stratum(some, seed, block):
    mixture = Mixture(some, seed)
    rows = np.arange(block * BLOCK, (block + 1) * BLOCK)
    sources, positions = mixture.locate(rows)
    for source, quota in enumerate(mixture.quotas):
        mine = sources == source
        expected = np.arange(block * quota, (block + 1) * quota)
        assert (positions[mine][np.lexsort((positions[mine], rows[mine] // STRATUM))] == expected).all()


@given(weights, seeds, st.lists(st.integers(0, 2**62 - 1), min_size=1, max_size=30))
@settings(deadline=None, max_examples=30)
def test_the_row_of_a_rows_source_and_position_is_the_row(some, seed, rows):
    mixture = Mixture(some, seed)
    sources, positions = mixture.locate(rows)
    back = [row_of(mixture, s, p) for s, p in zip(sources.tolist(), positions.tolist(), strict=True)]
    assert back == rows


@given(weights, seeds, st.integers(0, 2**60), st.integers(1, 100), st.integers(1, 5))
@settings(deadline=None, max_examples=30)
def test_rows_side_by_side_come_as_one_by_one(some, seed, first, count, stride):
    mixture, rows = Mixture(some, seed), first + np.arange(count) * stride
    alone = [mixture.locate([row]) for row in rows.tolist()]
    assert np.array_equal(np.stack(mixture.locate(rows)), np.stack(alone, axis=1)[..., 0])


def test_locate_is_sources_and_positions():
    mixture = Mixture([5, 3, 2], seed=7)
    rows = np.random.default_rng(0).integers(0, 2**62, size=(10, 100))
    sources, positions = mixture.locate(rows)
    assert (sources == mixture.sources(rows)).all()
    assert (positions == mixture.positions(rows)).all()
    assert sources.shape == (10, 100)


# No pattern


def test_two_blocks_are_dealt_differently():
    mixture = Mixture([1, 1], seed=7)
    first, second = (mixture.sources(np.arange(BLOCK) + block * BLOCK) for block in (0, 1))
    assert abs((first == second).mean() - 0.5) < 0.01  # five standard deviations


def test_two_seeds_are_dealt_differently():
    rows = np.arange(BLOCK)
    assert abs((Mixture([1, 1], 7).sources(rows) == Mixture([1, 1], 8).sources(rows)).mean() - 0.5) < 0.01


@pytest.mark.parametrize("stride", [2, 3, 7, 8, 16, 32, 64, 96, 256, 1024])
@pytest.mark.parametrize("some", [[1, 1], [5, 3, 2], [15, 1]], ids=str)
def test_no_rank_or_place_in_a_batch_sees_more_of_a_source_than_another(stride, some):
    """Shares seen by each of `stride` ranks are within 5 standard deviations of independent draws."""
    mixture = Mixture(some, seed=7)
    sources = mixture.sources(np.arange(stride * (4 * BLOCK // stride))).reshape(-1, stride)
    for source, quota in enumerate(mixture.quotas):
        share = quota / BLOCK
        sigma = math.sqrt(share * (1 - share) / len(sources))
        assert np.abs((sources == source).mean(axis=0) - share).max() < 5 * sigma


@pytest.mark.parametrize("some", [[1, 1], [5, 3, 2]], ids=str)
def test_what_a_rank_sees_has_no_period(some):
    """One rank of 64: the autocorrelation of "is it source 0" at lags 1 to 2,048 is that of noise."""
    is_first = Mixture(some, seed=7).sources(np.arange(0, 64 * BLOCK, 64)) == 0
    noise = (is_first - is_first.mean()) / is_first.std()
    power = np.abs(np.fft.rfft(noise, 2 * noise.size)) ** 2
    autocorrelation = np.fft.irfft(power)[1:2049] / math.sqrt(noise.size)
    assert np.abs(autocorrelation).max() < 5.5


def test_a_stratum_is_dealt_into_all_places_equally():
    """Which place of its stratum a rare source gets: 2,048 blocks, chi-square with 31 degrees below 31 + 5 x 8."""
    mixture = Mixture([65_535, 1], seed=7)
    stratum = row_of(mixture, 1, 0) // STRATUM * STRATUM  # the same one in every block
    rows = np.arange(2048)[:, None] * BLOCK + stratum + np.arange(STRATUM)
    _, places = np.nonzero(mixture.sources(rows) == 1)
    assert len(places) == 2048
    counts = np.bincount(places, minlength=STRATUM)
    assert ((counts - 64) ** 2 / 64).sum() < 71


# Values, versions, errors


def test_golden_values_belong_to_version_1():
    mixture = Mixture([5, 3, 2], seed=7)
    assert mixture.quotas == (32_768, 19_661, 13_107)
    sources, positions = mixture.locate(range(16))
    assert sources.tolist() == [2, 1, 1, 2, 0, 2, 0, 0, 0, 2, 1, 1, 1, 1, 0, 0]
    assert positions.tolist() == [0, 4, 2, 4, 0, 2, 14, 8, 9, 3, 5, 8, 7, 1, 15, 3]
    sources, positions = mixture.locate(BLOCK + np.arange(5))
    assert sources.tolist() == [0, 2, 0, 1, 2]
    assert positions.tolist() == [32_774, 13_111, 32_769, 19_665, 13_109]


def test_only_proportions_count():
    assert Mixture([7, 3], 1).quotas == Mixture([0.7, 0.3], 1).quotas == Mixture([7e300, 3e300], 1).quotas
    assert Mixture([1, 1, 1], 1).quotas == (21_846, 21_845, 21_845)


def test_one_source_gives_every_row_and_keeps_all_positions():
    sources, positions = Mixture([3.5], seed=7).locate(np.arange(BLOCK))
    assert sources.max() == 0
    assert (np.bincount(positions) == 1).all()


def test_mixtures_are_values():
    assert Mixture([7, 3], 1) == Mixture((7, 3), 1) != Mixture([7, 3], 2)
    assert hash(Mixture([7, 3], 1)) == hash(Mixture([7, 3], 1))
    pickled = pickle.dumps(Mixture([7, 3], 1))
    assert len(pickled) < 200
    assert pickle.loads(pickled) == Mixture([7, 3], 1)


@pytest.mark.parametrize("bad", [0, -1, math.inf, math.nan])
def test_a_weight_that_is_not_positive_and_finite_is_named(bad):
    with pytest.raises(ValueError, match=rf"weights\[1\] is {bad}: weights must be positive finite"):
        Mixture([1, bad], seed=0)


def test_a_weight_too_small_for_one_row_in_a_block_is_named_with_the_smallest_share():
    with pytest.raises(ValueError, match=r"weights\[1\] is 1e-06 of the total, which rounds to 0.*share is 1/65536"):
        Mixture([0.999999, 0.000001], seed=0)


def test_no_weights_are_refused():
    with pytest.raises(ValueError, match="at least one weight, got none"):
        Mixture([], seed=0)


def test_rows_that_do_not_exist_are_named():
    mixture = Mixture([1, 1], seed=0)
    with pytest.raises(IndexError, match="row -1 is out of range"):
        mixture.sources([-1])
    with pytest.raises(ValueError, match="num_rows must be at least 0, got -1"):
        mixture.counts(-1)

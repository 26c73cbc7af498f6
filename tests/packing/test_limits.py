"""Rows under several budgets: tokens, and what else documents take, such as pictures."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.packing import Packing, PackingSettings, count_rows, make_ledger, pack

from .examples import Lengths, draw_documents_with_pictures, keys, law, vector_cases

Case = tuple[Lengths, PackingSettings]


def taken_per_row(packing: Packing, documents: Lengths) -> Lengths:
    """What each row holds of every budget."""
    rows = np.repeat(np.arange(packing.num_rows), np.diff(packing.row_offsets))
    taken = np.zeros((packing.num_rows, documents.shape[1]), np.int64)
    np.add.at(taken, rows, documents[packing.documents])
    return taken


@law
@given(vector_cases(), keys)
def test_no_row_exceeds_a_budget_and_each_document_that_fits_is_in_one(case: Case, key: int) -> None:
    documents, settings = case
    packing = pack(documents, settings, key)
    budgets = np.array([settings.length, *settings.limits])
    belongs = (documents <= budgets).all(axis=1) & (documents[:, 0] > 0)
    assert sorted(packing.documents.tolist()) == np.flatnonzero(belongs).tolist()
    assert (taken_per_row(packing, documents) <= budgets).all()
    sizes = np.diff(packing.row_offsets)
    assert (sizes >= 1).all()
    assert (sizes <= (settings.max_documents or len(documents))).all()
    assert packing.lengths.tolist() == documents[packing.documents, 0].tolist()
    assert not packing.starts.any()


@law
@given(vector_cases(), st.permutations(range(50)), keys)
def test_the_number_of_rows_depends_on_neither_the_key_nor_the_order(case: Case, order: list[int], key: int) -> None:
    documents, settings = case
    turned = documents[[place for place in order if place < len(documents)]]
    assert pack(turned, settings, key).num_rows == count_rows(documents, settings) == count_rows(turned, settings)


@law
@given(vector_cases())
def test_the_ledger_accounts_for_every_token_and_every_unit(case: Case) -> None:
    documents, settings = case
    ledger, packing = make_ledger(documents, settings), pack(documents, settings, 5)
    assert ledger.num_rows == packing.num_rows
    assert ledger.num_tokens == documents[:, 0].sum()
    assert ledger.num_rows * settings.length == ledger.tokens_placed + ledger.padding_tokens
    placed = documents[packing.documents].sum(axis=0).tolist()
    assert [ledger.tokens_placed, *ledger.units_placed] == placed
    assert ledger.units_offered == tuple(ledger.num_rows * limit for limit in settings.limits)
    exceeds = (documents > [settings.length, *settings.limits]).any(axis=1)
    assert ledger.documents_dropped == int((exceeds & (documents[:, 0] > 0)).sum())
    assert all(0 <= fill <= 1 for fill in ledger.fills)
    both = ledger + make_ledger(documents[:0], settings)
    assert both.units_placed == ledger.units_placed


@pytest.mark.parametrize(
    ("length", "pictures", "tokens", "least"),
    [
        (8192, 16, 256, 0.99),
        (4096, 16, 256, 0.999),
        (4096, 16, 64, 0.999),
        (8192, 8, 64, 0.999),
        (8192, 64, 700, 0.999),
    ],
)
def test_the_binding_budget_is_filled(length: int, pictures: int, tokens: int, least: float) -> None:
    documents = draw_documents_with_pictures(100_000, tokens_per_picture=tokens, seed=0)
    settings = PackingSettings(length=length, long="drop", limits=(pictures,))
    assert max(make_ledger(documents, settings).fills) >= least


def test_documents_of_one_picture_each_are_spread_where_the_smallest_would_be_left_over() -> None:
    rng = np.random.default_rng(0)
    tokens = np.clip(rng.lognormal(5.5, 1.0, 50_000), 10, 3000).astype(np.int64) + 256
    documents = np.stack([tokens, np.ones_like(tokens)], axis=1)
    assert max(make_ledger(documents, PackingSettings(length=8192, long="drop", limits=(8,))).fills) > 0.999
    assert max(make_ledger(documents, PackingSettings(length=8192, long="drop", limits=(16,))).fills) > 0.97


def test_another_key_makes_other_rows_of_documents_that_take_the_same() -> None:
    documents = np.tile([[3, 1], [5, 0]], (500, 1))
    settings = PackingSettings(length=16, long="drop", limits=(2,))
    one, other = (pack(documents, settings, key) for key in (1, 2))
    assert one.documents.tolist() != other.documents.tolist()
    assert sorted(one.lengths.tolist()) == sorted(other.lengths.tolist())


def test_golden_rows() -> None:
    """The order of users' runs: a change needs a new PACKING_VERSION."""
    documents = np.array([[3, 1], [5, 2], [2, 0], [8, 0], [9, 0], [1, 3], [0, 1], [2, 0], [4, 1]])
    packing = pack(documents, PackingSettings(length=8, long="drop", limits=(2,)), 7)
    assert packing.row_offsets.tolist() == [0, 2, 3, 5, 6]
    assert packing.documents.tolist() == [1, 7, 3, 8, 0, 2]


@pytest.mark.parametrize("long", ["split", "truncate"])
def test_documents_are_not_cut_where_budgets_count_what_they_hold(long: str) -> None:
    with pytest.raises(ValueError, match=r"keeps documents whole .* got 1 and long="):
        PackingSettings(length=8, long=long, limits=(2,))  # type: ignore[arg-type]


def test_lengths_need_a_column_for_each_budget() -> None:
    with pytest.raises(ValueError, match=r"with 1 limits, lengths must have 2 columns, got \(3,\)"):
        count_rows(np.array([1, 2, 3]), PackingSettings(length=8, long="drop", limits=(2,)))
    with pytest.raises(ValueError, match="at most 7 limits; got 8"):
        PackingSettings(length=8, long="drop", limits=(1,) * 8)
    with pytest.raises(ValueError, match="limits must be from 1 to 1,073,741,824, got 0"):
        PackingSettings(length=8, long="drop", limits=(0,))

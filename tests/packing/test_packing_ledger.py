"""The ledger's balances, and that it tells what the packing did."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from penstock.packing import PackingLedger, PackingSettings, make_ledger, pack

from .examples import Lengths, cases, draw_web_lengths, keys, law

Case = tuple[Lengths, PackingSettings]


@law
@given(cases(), keys)
def test_the_ledger_balances_and_agrees_with_the_packing(case: Case, key: int) -> None:
    lengths, settings = case
    ledger, packing = make_ledger(lengths, settings), pack(lengths, settings, key)
    assert ledger.num_tokens == lengths.sum()
    assert ledger.num_tokens == ledger.tokens_placed + ledger.tokens_truncated + ledger.tokens_dropped
    assert ledger.num_rows * settings.length == ledger.tokens_placed + ledger.padding_tokens
    assert ledger.num_rows == packing.num_rows
    assert ledger.num_pieces == packing.num_pieces
    assert ledger.tokens_placed == packing.lengths.sum()


@law
@given(cases(), keys)
def test_every_document_is_placed_or_empty_or_dropped_and_cuts_are_pieces_that_continue(case: Case, key: int) -> None:
    lengths, settings = case
    ledger, packing = make_ledger(lengths, settings), pack(lengths, settings, key)
    num_pieces = np.bincount(packing.documents, minlength=lengths.size)
    assert ledger.num_documents == lengths.size
    assert np.count_nonzero(num_pieces) + ledger.num_empty + ledger.documents_dropped == lengths.size
    assert ledger.num_split == np.count_nonzero(num_pieces > 1)
    if settings.long == "split":
        assert ledger.targets_lost == np.count_nonzero(packing.starts)


def test_splitting_places_all_tokens_and_loses_a_target_per_cut() -> None:
    ledger = make_ledger(np.array([3, 0, 8, 9, 24]), PackingSettings(length=8))
    assert ledger == PackingLedger(
        num_documents=5, num_tokens=44, num_rows=6, num_pieces=7, tokens_placed=44, padding_tokens=4,
        num_empty=1, num_split=2, targets_lost=3,
    )  # fmt: skip


def test_truncating_counts_the_tokens_behind_the_first_row_and_one_target_per_document() -> None:
    ledger = make_ledger(np.array([3, 0, 8, 9, 24]), PackingSettings(length=8, long="truncate"))
    assert ledger == PackingLedger(
        num_documents=5, num_tokens=44, num_rows=4, num_pieces=4, tokens_placed=27, padding_tokens=5,
        num_empty=1, tokens_truncated=17, targets_lost=2,
    )  # fmt: skip


def test_dropping_counts_documents_and_tokens_and_cuts_nothing() -> None:
    ledger = make_ledger(np.array([3, 0, 8, 9, 24]), PackingSettings(length=8, long="drop"))
    assert ledger == PackingLedger(
        num_documents=5, num_tokens=44, num_rows=2, num_pieces=2, tokens_placed=11, padding_tokens=5,
        num_empty=1, documents_dropped=2, tokens_dropped=33,
    )  # fmt: skip


@law
@given(cases(), cases())
def test_the_sum_of_ledgers_adds_every_figure(one: Case, other: Case) -> None:
    first, second = make_ledger(*one), make_ledger(*other)
    total = sum([first, second], start=PackingLedger())
    assert total.num_rows == first.num_rows + second.num_rows
    assert total.padding_tokens == first.padding_tokens + second.padding_tokens
    assert total.num_tokens == total.tokens_placed + total.tokens_truncated + total.tokens_dropped


def test_nothing_packed_counts_as_filled() -> None:
    assert PackingLedger().fill == 1.0
    assert make_ledger(np.zeros(3, np.int64), PackingSettings(length=8)).fill == 1.0


def test_a_ledger_that_does_not_balance_cannot_be_made() -> None:
    with pytest.raises(AssertionError):
        PackingLedger(num_tokens=10, tokens_placed=9)


@pytest.mark.parametrize("length", [2048, 4096, 8192])
def test_windows_of_16384_rows_of_web_lengths_are_filled_to_9999_in_10000(length: int) -> None:
    settings = PackingSettings(length=length)
    windows = [draw_web_lengths(16_384 * length, seed=seed) for seed in range(8)]
    total = sum((make_ledger(lengths, settings) for lengths in windows), start=PackingLedger())
    assert total.fill >= 0.9999
    assert total.num_tokens == total.tokens_placed

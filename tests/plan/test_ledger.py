"""The account of an epoch, against counting what the batches really hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock
from penstock.plan import _pack_index

from .examples import lengths_lists, read_epoch, shuffled, tokens_dataset


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(lengths_lists, st.sampled_from([1, 4, 8]), st.sampled_from(["split", "truncate", "drop"]), st.data())
def test_the_ledger_of_a_packed_epoch_is_what_its_batches_hold(
    lengths: list[int], length: int, long: Any, data: st.DataObject
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_pack_index, "ROWS_PER_WINDOW", 2)
        max_documents = data.draw(st.sampled_from([None, 2]))
        plan = shuffled(tokens_dataset(lengths), data.draw).pack(length, long=long, max_documents=max_documents)
        plan, epoch = plan.batch(3, tail="short"), data.draw(st.integers(0, 2))
        ledger, batches = plan.ledger(epoch), read_epoch(plan, epoch)
    places = sum(batch["input_ids"].size for batch in batches)
    placed = sum(int((batch["document_ids"] >= 0).sum()) for batch in batches)
    targets = sum(batch["num_targets"] for batch in batches)
    packing = ledger.packing
    assert packing is not None
    assert (packing.num_documents, packing.num_tokens) == (len(lengths), sum(lengths))
    assert (packing.tokens_placed, packing.padding_tokens) == (placed, places - placed)
    assert packing.num_pieces == sum(batch["num_documents"] for batch in batches)
    assert packing.num_rows == ledger.num_rows == plan.num_rows == sum(len(batch["input_ids"]) for batch in batches)
    assert packing.num_tokens == placed + packing.tokens_truncated + packing.tokens_dropped
    assert ledger.fill == packing.fill == (placed / places if places else 1.0)
    # Of each document kept, all tokens but the first were targets, were it not for the cuts.
    kept = [n for n in lengths if n and not (long == "drop" and n > length)]
    lost_behind_cut = packing.tokens_truncated - (sum(n > length for n in kept) if long == "truncate" else 0)
    assert targets == sum(n - 1 for n in kept) - packing.targets_lost - lost_behind_cut


def test_dropped_rows_and_left_over_tokens_are_counted() -> None:
    plan = penstock.from_arrays({"x": np.arange(10)}).batch(4, tail="drop")
    assert (plan.ledger().num_rows, plan.ledger().rows_dropped) == (10, 2)
    assert penstock.from_arrays({"x": np.arange(10)}).batch(4).ledger().rows_dropped == 0
    windows = tokens_dataset([4, 7]).window(4)
    assert (windows.ledger().num_rows, windows.ledger().tokens_left_over) == (2, 3)
    assert windows.ledger().fill == 1.0
    assert windows.ledger().packing is None


def test_a_ledger_needs_no_batch_and_has_no_negative_epoch() -> None:
    plan = tokens_dataset([4, 7]).pack(4)
    assert plan.ledger(3).num_rows == 3
    with pytest.raises(IndexError, match="epochs count from 0"):
        plan.ledger(-1)


def test_a_mixture_sends_to_the_ledgers_of_its_sources() -> None:
    plan = penstock.mix({"a": (tokens_dataset([4]).pack(4), 1)}, seed=1, rows=4)
    with pytest.raises(ValueError, match="ask the plan of each for its ledger"):
        plan.ledger()


def test_a_lost_or_doubled_token_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.plan import _packed

    honest = _packed.pack

    def doubling(*arguments: Any) -> Any:
        packing = honest(*arguments)
        packing.documents[0] = packing.documents[-1]
        return packing

    plan = tokens_dataset([4, 4, 3]).pack(4)
    monkeypatch.setattr(_packed, "pack", doubling)
    with pytest.raises(AssertionError):
        plan.ledger()

"""The account of an epoch, against counting what the batches really hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock
from penstock.packing import _ledger
from plan.examples import lengths_lists, read_epoch, shuffled, tokens_dataset


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(lengths_lists, st.sampled_from([1, 4, 8]), st.sampled_from(["split", "truncate", "drop"]), st.data())
def test_the_ledger_of_a_packed_epoch_is_what_its_batches_hold(
    lengths: list[int], length: int, long: Any, data: st.DataObject
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_ledger, "ROWS_PER_WINDOW", 2)
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


@pytest.mark.parametrize("epoch", [0, 1, 3])
def test_the_ledger_of_a_mixture_says_what_each_source_gives(epoch: int) -> None:
    sources = {"web": tokens_dataset([4, 7, 9, 3] * 10).shuffle(1), "code": tokens_dataset([5, 2] * 3)}
    parts = {"web": (sources["web"].pack(8), 0.7), "code": (sources["code"].pack(8), 0.3)}
    plan = penstock.mix(parts, seed=1, epoch="web").batch(4, tail="drop")
    ledger = plan.ledger(epoch)
    given = dict.fromkeys(parts, 0)
    for step in range(plan.num_batches(epoch)):
        for source, _ in {(trace.source, trace.row) for trace in plan.documents(step, epoch)}:
            given[source] += 1
    assert ledger.num_rows == plan.num_rows == sum(source.num_rows for source in ledger.sources.values())
    assert ledger.rows_dropped == plan.num_rows % 4 == plan.num_rows - sum(given.values())
    assert all(0 <= ledger.sources[name].num_rows - rows <= ledger.rows_dropped for name, rows in given.items())
    for name, (stages, _) in parts.items():
        assert ledger.sources[name].one_pass == stages.ledger()
        assert ledger.sources[name].num_passes == ledger.sources[name].num_rows / stages.num_rows


def test_the_fill_of_a_mixture_weighs_those_of_its_sources_also_of_mixtures() -> None:
    full, half = tokens_dataset([8]).pack(8), tokens_dataset([4]).pack(8)
    inner = penstock.mix({"full": (full, 1), "half": (half, 1)}, seed=1, rows=64)
    assert inner.ledger().fill == 0.75
    outer = penstock.mix({"inner": (inner, 1), "full": (full, 3)}, seed=2, rows=64)
    assert outer.ledger().sources["inner"].one_pass.sources["half"].num_rows == 32
    assert outer.ledger().fill == 0.75 * 0.25 + 1.0 * 0.75


def test_a_lost_or_doubled_token_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.plan import _packed_rows

    honest = _packed_rows.pack

    def doubling(*arguments: Any) -> Any:
        packing = honest(*arguments)
        packing.documents[0] = packing.documents[-1]
        return packing

    plan = tokens_dataset([4, 4, 3]).pack(4)
    monkeypatch.setattr(_packed_rows, "pack", doubling)
    with pytest.raises(AssertionError):
        plan.ledger()


def test_a_ledger_reads_as_lines_of_what_there_is_and_what_is_lost() -> None:
    plan = tokens_dataset([3, 5, 0, 9]).pack(8).batch(2, tail="drop")
    assert str(plan.ledger()).splitlines() == [
        "rows              3",
        'rows dropped      1  in no batch, by tail="drop"',
        "documents         4  in 4 pieces, 1 document split",
        "tokens           17",
        "tokens placed    17  70.83 % of all places",
        "padding           7  places without a token",
        "documents empty   1  in no row",
        "targets lost      1  the token before a cut predicts nothing",
    ]
    assert repr(plan.ledger()).startswith("Ledger(num_rows=3, rows_dropped=1,")


def test_a_ledger_of_a_mixture_names_each_source_once() -> None:
    sources = {"web": (tokens_dataset([4] * 10).pack(4), 3), "books": (tokens_dataset([2] * 10).pack(4), 1)}
    ledger = penstock.mix(sources, seed=1, rows=64).ledger()
    assert str(ledger).splitlines() == [
        "rows           64",
        "rows of web    48  4.80 passes over 10 rows, 100.00 % full",
        "rows of books  16  3.20 passes over 5 rows, 100.00 % full",
    ]


def test_what_was_not_counted_is_a_question_mark() -> None:
    plan = penstock.from_arrays({"x": np.arange(10)}).map(lambda row: row, on_error="skip").batch(4)
    assert str(plan.ledger()).splitlines()[1].split()[:3] == ["rows", "replaced", "?"]

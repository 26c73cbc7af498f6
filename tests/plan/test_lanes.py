"""`shuffle(lanes=)`: every kind of row in lanes, resumed in any world; each rank needs its own shards alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock
from penstock.errors import StageError
from penstock.plan import Plan, _epochs, _packed_rows

from .examples import assert_same, make_documents, write_tokens

few = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
NUM_SHARDS = 24


@pytest.fixture(autouse=True, scope="module")
def _tiny_windows() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_epochs, "STORAGE_WINDOW_BYTES", 48)
        yield


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 shards of 10 documents of 8 tokens."""
    path = tmp_path_factory.mktemp("corpus") / "data"
    documents = make_documents([8] * 10 * NUM_SHARDS)
    return write_tokens(path, documents, shard_bytes=480, x=("int64", np.arange(10 * NUM_SHARDS)))


KINDS: dict[str, Any] = {
    "samples": lambda ds, **how: ds.shuffle(3, **how),
    "windows": lambda ds, **how: ds.shuffle(3, **how).window(4),
    "packed": lambda ds, **how: ds.shuffle(3, **how).pack(16),
    "padded": lambda ds, **how: ds.shuffle(3, **how).pad(),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def contents(batch: dict[str, Any]) -> list[Any]:
    """What identifies each row."""
    key = "input_ids" if "input_ids" in batch else "x"
    return np.asarray(batch[key]).tolist()


def epoch_of(plan: Plan, epoch: int) -> list[Any]:
    return [row for step in range(plan.num_batches(epoch)) for row in contents(plan.read(step, epoch))]


@kinds
def test_every_epoch_holds_the_same_rows_in_another_order(corpus: Path, kind: str) -> None:
    plan = KINDS[kind](penstock.open(corpus), lanes=4).batch(10, tail="short")
    assert len(penstock.open(corpus).storage.manifest.shards) == NUM_SHARDS
    one, other = (epoch_of(plan, epoch) for epoch in (0, 1))
    assert one != other
    if kind != "packed":  # whose documents are paired anew
        assert sorted(map(str, one)) == sorted(map(str, other))
    tokens = [sorted(np.asarray(each).reshape(-1).tolist()) for each in (one, other)]
    assert tokens[0] == tokens[1]


@kinds
@given(data=st.data())
@few
def test_a_run_goes_on_at_any_row_with_any_number_of_ranks(corpus: Path, kind: str, data: st.DataObject) -> None:
    """A batch of 64 rows from any row on is the same rows for 1 to 64 ranks."""
    plan = KINDS[kind](penstock.open(corpus), lanes=data.draw(st.sampled_from([2, 4, 6, 32]))).batch(64)
    world = data.draw(st.sampled_from([1, 2, 4, 8, 16, 32, 64]))
    row = data.draw(st.integers(0, 3 * plan.num_rows))
    whole = contents(plan.read_at(row))
    ranks = [contents(plan.read_at(row, rank, world)) for rank in range(world)]
    assert [ranks[place % world][place // world] for place in range(64)] == whole


@kinds
@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4, 6])
def test_nodes_share_the_shards_and_need_the_same_ones_in_every_epoch(corpus: Path, kind: str, num_nodes: int) -> None:
    """12 lanes of two shards, nodes of two ranks: min(1, ranks / gcd(world, lanes)) of the data."""
    plan = KINDS[kind](penstock.open(corpus), lanes=12).batch(24)
    world, needed = 2 * num_nodes, []
    for node in range(num_nodes):
        ranks = range(2 * node, 2 * node + 2)
        epochs = [
            set(plan.uses(start, start + plan.num_rows, ranks=ranks, world_size=world).shard.tolist())
            for start in range(0, 3 * plan.num_rows, plan.num_rows)
        ]
        assert epochs[0] == epochs[1] == epochs[2]
        needed.append(epochs[0])
    assert {len(each) for each in needed} == {NUM_SHARDS * min(1, 2 / math.gcd(world, 12))}
    assert set().union(*needed) == set(range(NUM_SHARDS))


@kinds
def test_one_lane_is_the_order_without_lanes(corpus: Path, kind: str) -> None:
    """To the fingerprint: states and files from before there were lanes still fit."""
    plan, old = (KINDS[kind](penstock.open(corpus), **how).batch(10) for how in ({"lanes": 1}, {}))
    assert (plan.fingerprint, plan.order_fingerprint) == (old.fingerprint, old.order_fingerprint)
    assert plan.to_toml() == old.to_toml()
    assert "lanes" not in plan.to_toml() + repr(plan) + str(plan.order_facts)
    assert_same(plan.read(3), old.read(3))


@kinds
def test_lanes_are_in_files_fingerprints_and_descriptions(corpus: Path, kind: str, tmp_path: Path) -> None:
    plan, other = (KINDS[kind](penstock.open(corpus), lanes=lanes).batch(8) for lanes in (4, 8))
    (tmp_path / "plan.toml").write_text(plan.to_toml())
    again = penstock.load_plan(tmp_path / "plan.toml")
    assert (again.fingerprint, again.order_fingerprint) == (plan.fingerprint, plan.order_fingerprint)
    assert other.order_fingerprint != plan.order_fingerprint
    assert "lanes=4" in repr(plan)
    assert plan.order_facts["shuffle"] == "seed=3, mode='windows', group=2, lanes=4"


def test_a_state_of_other_lanes_is_refused_with_both_numbers(corpus: Path) -> None:
    plans = [penstock.open(corpus).shuffle(3, lanes=lanes).pack(16).batch(8) for lanes in (4, 8)]
    one, other = (penstock.DataLoader(plan, workers="inline") for plan in plans)
    next(iter(one))
    with pytest.raises(penstock.errors.StateError, match=r"lanes=4.*lanes=8"):
        other.load_state_dict(one.state_dict())


def test_rows_of_token_windows_end_with_their_shard(corpus: Path) -> None:
    """A shard of 80 tokens has 19 rows of 4, with the token after each; the ledger counts the other four."""
    plan = penstock.open(corpus).shuffle(3, lanes=4).window(4).batch(8)
    assert plan.num_rows == 19 * NUM_SHARDS
    assert plan.ledger().tokens_left_over == 4 * NUM_SHARDS
    for step in range(plan.num_batches()):
        batch = plan.read(step)
        assert (batch["labels"][:, :-1] == batch["input_ids"][:, 1:]).all()
        assert (batch["labels"] >= 0).all()
        assert len(plan.documents(step)) >= 8


@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_ranks_apart_do_not_count_the_targets_of_others(corpus: Path, kind: str) -> None:
    plan = KINDS[kind](penstock.open(corpus), lanes=4).batch(8)
    assert "num_targets_global" not in plan.read(0, rank=1, world_size=2)
    parts = [plan.read(0, rank=rank, world_size=2)["num_targets"] for rank in range(2)]
    assert plan.read(0)["num_targets_global"] == sum(parts)
    assert plan.read_at(0, part=1, num_parts=2)["num_targets_global"] == sum(parts)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda ds: ds.shuffle(1, "full", lanes=4), "mode='full', lanes"),
        (lambda ds: ds.balance("x").shuffle(1, lanes=4), r"lanes=\.\.\.\) and balance\(\)"),
        (lambda ds: ds.sample("x").shuffle(1, lanes=4), r"lanes=\.\.\.\) and sample\(\)"),
        (lambda ds: ds.shuffle(1, lanes=4).pad(bucket=8), r"lanes=\.\.\.\) and pad\(bucket=\.\.\.\)"),
        (lambda ds: ds.shuffle(1, lanes=4).pad().batch(8, balance="tokens"), r"and batch\(balance=\.\.\.\)"),
        (lambda ds: ds.shuffle(1, lanes=4).pad().batch(tokens=64), r"and batch\(tokens=\.\.\.\)"),
        (lambda ds: penstock.mix({"a": (ds.shuffle(1, lanes=4), 1)}, seed=1, rows=9), "'a' is shuffled with lanes"),
        (lambda ds: ds.shuffle(1, lanes=0), "lanes"),
    ],
    ids=["full", "balance", "sample", "bucket", "dealt", "tokens", "mix", "none"],
)
def test_where_rows_would_leave_their_lane_it_is_refused(corpus: Path, make: Any, message: str) -> None:
    with pytest.raises((StageError, ValueError), match=message):
        make(penstock.open(corpus))


def test_batches_of_sorted_data_are_as_mixed_as_under_a_full_shuffle() -> None:
    """Forty classes one after the other: within a tenth, where a batch has no more rows than there are lanes."""
    labels = np.arange(80_000) // 2000
    ds = penstock.from_arrays({"x": np.zeros((80_000, 1), np.int64), "label": labels})
    (found,) = ds.shuffle(1, lanes=256).batch(256).mixing()
    (without,) = ds.shuffle(1, group=16).batch(256).mixing()
    assert 0.8 < found.variance < 1.1
    assert without.variance > 10


def test_packed_windows_of_lanes_are_kept_while_they_are_read_and_no_longer(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank of four has a lane of six shards: it packs each once in an epoch, and keeps one, or two where one ends."""
    for name in ("_KEPT_BYTES", "_ROWS_BEHIND"):
        monkeypatch.setattr(_packed_rows, name, 0)
    plan = penstock.open(corpus).shuffle(3, group=1, lanes=4).pack(16).batch(8)
    rows, packed, most = plan.row_source, [], 0
    assert isinstance(rows, _packed_rows.PackedRows)
    pack = rows._blocks._pack
    monkeypatch.setattr(rows._blocks, "_pack", lambda *key: packed.append(key) or pack(*key))
    for step in range(plan.num_batches()):
        plan.read(step, rank=1, world_size=4)
        most = max(most, len(rows._blocks._snapshot.blocks))
    assert len(packed) == len(set(packed)) == NUM_SHARDS // 4
    assert most <= 2

"""`plan.egress`: what nodes fetch, from manifests alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock
from penstock.errors import StageError
from penstock.plan import Dataset, _epochs
from penstock.schema import Schema
from penstock.shards import Manifest, ShardEntry

SHARD, ROWS, NUM_SHARDS = 1 << 20, 64, 192
few = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def unseen(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """192 MiB of rows of 16 KiB in shards that do not exist: whoever touched data would fail."""
    folder = tmp_path_factory.mktemp("unseen")
    entries = [
        ShardEntry(f"shard-{number:06d}-{number:016x}.safetensors", ROWS, {}, SHARD, 4096, number)
        for number in range(NUM_SHARDS)
    ]
    manifest = Manifest(Schema.parse({"tokens": "uint16[8192]"}), tuple(entries))
    (folder / "manifest.json").write_bytes(manifest.to_bytes())
    return penstock.open(folder)


@given(nodes=st.sampled_from([1, 2, 3, 4, 6, 8, 12]), ranks=st.sampled_from([1, 2, 4]))
@few
def test_a_node_needs_its_share_of_the_data_and_fetches_it_once(unseen: Dataset, nodes: int, ranks: int) -> None:
    world = nodes * ranks
    plan = unseen.shuffle(3, lanes=48).batch(4 * world)
    found = plan.egress(nodes, ranks, epochs=3)
    share = min(1, ranks / math.gcd(world, 48))
    assert found.needed_bytes == NUM_SHARDS * SHARD * share
    assert [each.node_bytes for each in found.epochs] == [found.needed_bytes, 0, 0]
    assert found.is_enough


def test_without_lanes_every_node_reads_everything(unseen: Dataset) -> None:
    found = unseen.shuffle(3).batch(64).egress(8, 4)
    assert found.needed_bytes == found.data_bytes == NUM_SHARDS * SHARD
    assert found.simulated_nodes == (0,)
    page = found.page("plan.toml")
    assert [each.change for each in page.findings if each.id == "lanes"] == ["shuffle(..., lanes=32)"]


def test_without_lanes_a_small_cache_fetches_a_shard_for_each_of_its_windows(unseen: Dataset) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_epochs, "STORAGE_WINDOW_BYTES", SHARD // 16)
        found = unseen.shuffle(3, group=8).batch(64).egress(1, 4, cache_bytes=24 * SHARD)
    assert found.epochs[0].node_bytes > 10 * found.data_bytes
    (finding,) = [each for each in found.page("plan").findings if each.id == "lanes"]
    assert "times in an epoch" in finding.evidence[0]
    assert finding.change == "shuffle(..., lanes=4)"  # whose eight shards leave room for the next ones
    lanes = unseen.shuffle(3, lanes=4).batch(64).egress(1, 4, cache_bytes=24 * SHARD)
    assert lanes.epochs[0].node_bytes == lanes.data_bytes


def test_a_smaller_cache_fetches_more_and_less_than_by_recency(unseen: Dataset) -> None:
    plan = unseen.shuffle(3, lanes=16).batch(64)
    sizes = [96 * SHARD, 64 * SHARD, 32 * SHARD]
    later = [plan.egress(2, 8, cache_bytes=size).epochs[-1] for size in sizes]
    fetched, by_lru = [each.node_bytes for each in later], [each.lru_bytes for each in later]
    assert fetched == sorted(fetched)
    assert fetched[0] == 0 < fetched[1] < by_lru[1] <= 96 * SHARD
    assert fetched[1] >= 96 * SHARD - sizes[1]  # no cache can do better


def test_a_cache_below_what_is_read_at_a_time_is_said_to_be_too_small(unseen: Dataset) -> None:
    found = unseen.shuffle(3, lanes=16, group=2).batch(64).egress(2, 8, cache_bytes=31 * SHARD)
    assert found.in_use_bytes == 32 * SHARD  # eight lanes, two shards of each, and the next two
    assert not found.is_enough
    (finding,) = [each for each in found.page("plan").findings if each.id == "cache"]
    assert finding.title == "The cache must hold 33.6 MB at least"


def test_bandwidth_is_enough_or_the_nodes_wait(unseen: Dataset) -> None:
    plan = unseen.shuffle(3, lanes=16).batch(64)
    needed = plan.egress(2, 8, bandwidth=1e6).least_step_seconds
    assert needed == pytest.approx(96 * SHARD / 1e6 / (NUM_SHARDS * ROWS / 64))
    slow, quick = (plan.egress(2, 8, bandwidth=1e6, step_seconds=factor * needed) for factor in (0.5, 3))
    assert slow.waits
    assert not slow.is_enough
    busy, last_group = needed * slow.epoch_steps, needed * slow.epoch_steps / 6  # of twelve shards in a lane two
    assert slow.epochs[0].waited_seconds == pytest.approx(busy - 0.5 * (busy - last_group), rel=0.01)
    assert not quick.waits
    assert slow.page("plan").charts


def test_topics_stored_one_after_the_other_are_as_mixed_as_under_a_full_shuffle(unseen: Dataset) -> None:
    """Within a tenth, where a batch has no more rows than there are lanes; groups of one window are far from it."""
    lanes, full, few_windows = (
        unseen.shuffle(3, **how).batch(64).egress().variance for how in ({"lanes": 64}, {"mode": "full"}, {"group": 1})
    )
    assert lanes is not None
    assert full == pytest.approx(1, abs=0.1)
    assert lanes < 1.1
    assert few_windows > 3


@pytest.mark.parametrize(
    "cut",
    [lambda plan: plan, lambda plan: plan.take(rows=3000), lambda plan: plan.repeat(2), lambda plan: plan.skip(rows=9)],
)
def test_epochs_of_any_length_are_simulated(unseen: Dataset, cut: Any) -> None:
    plan = cut(unseen.shuffle(3, lanes=16)).batch(48)
    found = plan.egress(2, 8)
    assert found.epochs[0].node_bytes >= found.epochs[1].node_bytes
    assert found.variance is not None


def test_a_mixture_is_simulated_without_its_mixing(tmp_path: Path) -> None:
    parts = {}
    for name in "ab":
        with penstock.DatasetWriter(tmp_path / name, {"x": "int64"}, shard_bytes=800) as writer:
            writer.write_batch({"x": np.arange(1000)})
        parts[name] = (penstock.open(tmp_path / name).shuffle(1), 1.0)
    found = penstock.mix(parts, seed=1, rows=2000).batch(50).egress(2, 1)
    assert found.variance is None
    assert found.epochs[0].node_bytes == found.data_bytes
    assert found.epochs[1].node_bytes == 0


def test_data_that_is_in_no_shards_is_fetched_from_nowhere() -> None:
    found = penstock.from_arrays({"x": np.arange(100)}).shuffle(1).batch(10).egress(2, 1)
    assert found.data_bytes == found.epochs[0].node_bytes == 0


def test_the_page_and_the_json_say_the_same(unseen: Dataset) -> None:
    found = unseen.shuffle(3, lanes=16).batch(64).egress(2, 8, cache_bytes=10**9, bandwidth=1e9, step_seconds=1.0)
    told = json.loads(json.dumps(found.to_json()))
    assert told["epochs"][0]["node_bytes"] == found.epochs[0].node_bytes
    assert told["settings"]["cache_bytes"] == 10**9
    assert "101 MB" in str(found)
    assert found.page("plan").verdict == "2 nodes fetch 201 MB in the first epoch and 0 bytes in each later one."


@pytest.mark.parametrize("wrong", [{"nodes": 0}, {"ranks": 1.5}, {"cache_bytes": 0}, {"bandwidth": math.inf}])
def test_what_is_no_number_of_anything_is_refused(unseen: Dataset, wrong: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match=f"egress.*{next(iter(wrong))}"):
        unseen.shuffle(1).batch(8).egress(**wrong)


def test_batches_of_as_many_rows_as_a_budget_holds_are_refused() -> None:
    ragged = penstock.from_arrays({"tokens": [np.arange(length) for length in (3, 1, 4)]})
    with pytest.raises(StageError, match="must be known without data"):
        ragged.shuffle(1).pad().batch(tokens=8).egress(2)


def test_ranks_that_cannot_share_a_batch_are_refused(unseen: Dataset) -> None:
    with pytest.raises(ValueError, match="cannot be shared evenly by 24 ranks"):
        unseen.shuffle(1).batch(8).egress(3, 8)

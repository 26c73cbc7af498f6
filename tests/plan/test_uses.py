"""Which shards the next rows need: with those alone, every batch can be read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock
from penstock.packing import _ledger
from penstock.plan import Plan, _budget, _epochs, _reading

from .examples import assert_same, make_documents, write_tokens

few = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True, scope="module")
def _tiny_windows() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_epochs, "STORAGE_WINDOW_BYTES", 48)
        patch.setattr(_ledger, "ROWS_PER_WINDOW", 3)
        patch.setattr(_reading, "_CHUNK_ROWS", 8)
        patch.setattr(_budget, "_CHUNK_BATCHES", 1)
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two datasets of about twenty shards, alike but for their samples; and columns beside the first."""
    made, rng = [], np.random.default_rng(1)
    for name, first, count in (("one", 1, 90), ("two", 10_000, 70)):
        lengths = rng.integers(0, 12, count)
        documents = make_documents(lengths.tolist(), first=first)
        columns = {
            "x": ("int64", np.arange(first, first + count)),
            "kind": ("int64", np.sort(rng.integers(1, 4, count))),
            "loss_mask": ("uint8[*]", [np.ones(length, np.uint8) for length in lengths]),
        }
        made.append(write_tokens(tmp_path_factory.mktemp(name) / "data", documents, **columns))
    beside = tmp_path_factory.mktemp("beside") / "data"
    with penstock.DatasetWriter(beside, {"y": "int64", "z": "float32[3]"}, shard_bytes=96) as writer:
        for number in range(90):
            writer.write({"y": number, "z": np.full(3, number, np.float32)})
    return [*made, beside]


def dataset(draw: st.DrawFn, folders: list[Path]) -> Any:
    """A dataset over one folder or several."""
    one, two, beside = (penstock.open(path) for path in folders)
    kind = draw(st.sampled_from(["plain", "plain", "split", "filter", "take", "concat", "zip"]))
    match kind:
        case "split":
            return one.split({"train": 0.7, "val": 0.3}, seed=draw(st.integers(0, 3)))["train"]
        case "filter":
            return one.filter(x=lambda x: x % 5 == 1)
        case "take":
            return one.take(np.random.default_rng(draw(st.integers(0, 3))).permutation(len(one))[:40])
        case "concat":
            return penstock.concat(one, two.filter(x=lambda x: x % 3 > 0))
        case "zip":
            return one.zip(beside)
        case _:
            return one


def shuffled(draw: st.DrawFn, source: Any, *, lanes: bool = True) -> Any:
    mode = draw(st.sampled_from(["none", "windows", "windows", "full", *["lanes"] * 3 * lanes]))
    seed, group = draw(st.integers(0, 5)), draw(st.integers(1, 3))
    if mode == "lanes":
        return source.shuffle(seed, group=group, lanes=draw(st.sampled_from([2, 4, 8])))
    return source if mode == "none" else source.shuffle(seed, mode, group)


def rows(draw: st.DrawFn, folders: list[Path], kind: str) -> Any:
    source = dataset(draw, folders)
    match kind:
        case "unfold":
            steps = penstock.open(folders[2]).select_columns(["y", "z"])
            return shuffled(draw, steps.unfold(draw(st.integers(1, 5)), stride=draw(st.integers(1, 7))))
        case "sample":
            return shuffled(draw, source.sample("kind", rows=draw(st.integers(5, 60))), lanes=False)
        case "balance":
            return shuffled(draw, source.balance("kind", rows=draw(st.integers(5, 60))), lanes=False)
        case "pad":
            bucket = draw(st.sampled_from([None, 5, 16]))
            return shuffled(draw, source, lanes=bucket is None).pad(bucket=bucket, run=2)
        case "window":
            return shuffled(draw, source).window(draw(st.sampled_from([1, 4, 9])))
        case "pack":
            keep = draw(st.sampled_from([(), ("x",)]))
            return shuffled(draw, source if draw(st.booleans()) else source.select_columns(["tokens", "x"])).pack(
                8, keep=keep
            )
        case "mix":
            sources = {
                name: penstock.open(path).select_columns(["x", "kind"])
                for name, path in zip("ab", folders, strict=False)
            }
            schedule = {96: {"b": 1}, 160: {"a": 1, "b": 3}} if draw(st.booleans()) else None
            parts = {
                name: (shuffled(draw, each, lanes=False), weight)
                for (name, each), weight in zip(sources.items(), (3, 1), strict=True)
            }
            return penstock.mix(parts, seed=1, rows=draw(st.integers(40, 300)), schedule=schedule)
        case "packed mix":
            parts = {
                name: (shuffled(draw, penstock.open(path), lanes=False).pack(8), 1)
                for name, path in zip("ab", folders, strict=False)
            }
            return penstock.mix(parts, seed=1, rows=draw(st.integers(40, 300)))
        case _:
            return shuffled(draw, source)


KINDS = ["samples", "samples", "unfold", "sample", "balance", "pad", "window", "pack", "pack", "mix", "packed mix"]


@st.composite
def plans(draw: st.DrawFn, folders: list[Path]) -> Plan:
    plan = rows(draw, folders, draw(st.sampled_from(KINDS))).as_plan()
    match draw(st.sampled_from(["none", "none", "take", "skip", "repeat"])):
        case "take":
            plan = plan.take(rows=draw(st.integers(1, 2 * plan.num_rows)))
        case "skip":
            plan = plan.skip(rows=draw(st.integers(0, plan.num_rows - 1)))
        case "repeat":
            plan = plan.repeat(2)
    size, tail = draw(st.sampled_from([4, 8, 12])), draw(st.sampled_from(["carry", "carry", "short", "pad", "drop"]))
    if draw(st.booleans()):
        return plan.batch(size, tail=tail)
    by_lengths = {
        "dealt": {"global_size": size, "balance": "attention"},
        "tokens": {"tokens": 16 * size, "multiple": size},
    }
    with contextlib.suppress(penstock.errors.StageError, penstock.errors.SchemaError):  # rows without lengths, lanes
        return plan.batch(**by_lengths[draw(st.sampled_from(["dealt", "tokens"]))], tail=tail)
    return plan.batch(size, tail=tail)


@contextmanager
def only(plan: Plan, kept: set[tuple[int, int]]) -> Iterator[None]:
    """All folders of shards without the files that are not in `kept`."""
    moved = []
    for number, folder in enumerate(plan.shard_folders):
        folder.shards.reset()
        for shard, entry in enumerate(folder.manifest.shards):
            if (number, shard) not in kept:
                path = folder.path / entry.name
                moved.append((path, path.rename(path.with_suffix(".away"))))
    try:
        yield
    finally:
        for path, away in moved:
            away.rename(path)


@few
@given(data=st.data())
def test_every_batch_is_read_from_the_shards_that_are_named_for_its_rows(
    folders: list[Path], data: st.DataObject
) -> None:
    plan = data.draw(plans(folders))
    world_size = data.draw(st.sampled_from([1, 2, 4]))
    ranks = range(data.draw(st.integers(0, world_size - 1)), world_size)
    size, begin = plan.global_size, data.draw(st.integers(0, 3 * plan.num_rows))
    num_batches = data.draw(st.integers(1, 6))
    starts, row = [], begin
    for _ in range(num_batches):
        row = plan.steps.skip_tail(row)
        starts.append(row)
        row = plan.steps.next_row(row)
    uses = plan.uses(begin, row, ranks=ranks, world_size=world_size)
    assert uses.end == row
    assert (np.diff(uses.first_row) >= 0).all()
    assert (uses.first_row <= uses.last_row).all()
    assert uses.first_row.min(initial=begin) >= begin
    assert uses.last_row.max(initial=begin) < row
    start = data.draw(st.sampled_from(starts))
    rank = data.draw(st.sampled_from(ranks))
    expected = plan.read_at(start, rank, world_size)
    is_active = (uses.first_row < max(start + size, plan.steps.next_row(start))) & (uses.last_row >= start)
    active = set(zip(uses.folder[is_active].tolist(), uses.shard[is_active].tolist(), strict=True))
    fresh = Plan(plan.source, plan.stages)
    assert fresh.num_rows == plan.num_rows  # what building it reads is not meant
    assert getattr(fresh.steps, "chunk_rows", 0) == getattr(plan.steps, "chunk_rows", 0)
    with only(fresh, active):
        assert_same(fresh.read_at(start, rank, world_size), expected)


def test_a_group_of_windows_names_its_shards_and_no_others(folders: list[Path]) -> None:
    plan = penstock.open(folders[0]).select_columns(["x"]).shuffle(3, group=2).batch(4)
    (folder,) = plan.shard_folders
    uses = plan.uses(0, 12)
    for row in (0, 4, 8):
        plan.read_at(row)
    opened = {number for number in range(len(folder.starts) - 1) if folder.shards.table.rows[number].any()}
    assert opened <= set(uses.shard.tolist())
    assert len(uses) < len(folder.starts) // 2


def test_a_shard_that_is_left_and_read_again_has_several_uses(folders: list[Path]) -> None:
    plan = penstock.open(folders[0]).select_columns(["x"]).shuffle(3, group=1).batch(6)
    uses = plan.uses(0, 2 * plan.num_rows)
    for shard in range(len(plan.shard_folders[0].starts) - 1):
        own = uses.shard == shard
        assert own.sum() >= 2
        assert (uses.first_row[own][1:] > uses.last_row[own][:-1] + 1).all()

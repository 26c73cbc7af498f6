"""The numbers that a loader gives about itself."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
import torch

import penstock
from pytorch.examples import numbers
from pytorch.functions import be_slow
from waiting import wait_until

OPTIONS: list[Any] = [
    {"workers": "inline"},
    {"workers": "thread", "num_workers": 2},
    {"workers": "process", "num_workers": 2, "start_method": "fork"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["inline", "thread", "process"])
def test_statistics_add_up(options: Any) -> None:
    plan = numbers(80).map(be_slow).batch(8)
    begin = time.perf_counter()
    with penstock.DataLoader(plan, **options) as loader:
        assert loader.stats().num_batches == 0
        assert loader.stats().ready_share == 1.0
        for number, _ in enumerate(loader):
            time.sleep(0.03)
            if options["workers"] != "inline" and number < 9:
                assert wait_until(lambda: loader.stats().num_queued > 0)
        stats = loader.stats()
    elapsed = time.perf_counter() - begin
    assert stats.num_batches == 10
    assert stats.num_bytes == 80 * (8 + 64 * 4)
    assert stats.step_seconds >= 9 * 0.03
    assert stats.produce_seconds >= 80 * 0.002
    assert 0 < stats.worker_cpu_seconds < stats.produce_seconds
    assert stats.wait_seconds + stats.step_seconds + stats.copy_seconds <= elapsed
    assert 0 < stats.copy_seconds < stats.wait_seconds + 1
    assert stats.page_faults >= 0
    assert 0 < stats.num_buffers_in_use <= stats.num_buffers
    assert stats.num_workers == options.get("num_workers", 0)
    assert stats.prefetch == (4 if options["workers"] != "inline" else 1)
    if options["workers"] == "inline":
        assert stats.num_ready == 0
        assert stats.wait_seconds >= 80 * 0.002
    else:
        assert stats.ready_share >= 0.9  # all but the first


def test_statistics_are_a_copy_of_plain_numbers() -> None:
    with penstock.DataLoader(numbers().batch(4), num_workers=0) as loader:
        next(iter(loader))
        stats = loader.stats()
        stats.num_batches = 99
        assert loader.stats().num_batches == 1
    values = dataclasses.asdict(stats)
    assert values.pop("decisions") == ()
    assert all(type(value) in (int, float) for value in values.values())


def test_waiting_shows_in_torchs_profiler() -> None:
    with (
        penstock.DataLoader(numbers().batch(4), workers="thread") as loader,
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
    ):
        list(loader)
    assert "penstock.wait" in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("options", OPTIONS, ids=["inline", "thread", "process"])
def test_batches_that_are_ready_are_counted(options: Any) -> None:
    with penstock.DataLoader(numbers(80).batch(8), prefetch=4, **options) as loader:
        assert loader.stats().num_queued == 0
        batches = iter(loader)
        next(batches)
        expected = 0 if options["workers"] == "inline" else 4
        deadline = time.monotonic() + 30
        while loader.stats().num_queued != expected:
            assert time.monotonic() < deadline
        assert sum(1 for _ in batches) == 9
        assert loader.stats().num_queued == 0


def test_batches_of_a_torch_dataset_that_are_ready_are_counted() -> None:
    with penstock.DataLoader(range(40), batch_size=4, num_workers=2, prefetch_factor=2) as loader:
        batches = iter(loader)
        next(batches)
        deadline = time.monotonic() + 30
        while loader.stats().num_queued < 4:
            assert time.monotonic() < deadline
        assert sum(1 for _ in batches) == 9

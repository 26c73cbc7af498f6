"""Loaders that the doctor rebuilds: like the script's own, but for what is tried."""

from __future__ import annotations

import itertools
from collections import deque

import numpy as np

import penstock
from penstock.doctor import Trial, rebuild


def rebuilt(loader: penstock.DataLoader, **changes: object) -> penstock.DataLoader:
    trial = Trial(number=2, name="tried", kind="options", changes=changes)
    found = rebuild(loader, trial, remaining=None, remembered=deque())
    assert isinstance(found, penstock.DataLoader)
    return found


def test_a_plans_loader_that_goes_on_over_epochs_is_tried_with_a_loop_that_does() -> None:
    plan = penstock.from_arrays({"x": np.arange(40)}).shuffle(seed=1).batch(4)
    with penstock.DataLoader(plan, workers="thread", num_workers=1, epochs=None) as loader:
        first = next(iter(loader))
        with rebuilt(loader, num_workers=2) as tried:
            batches = list(itertools.islice(tried, 3 * plan.num_batches()))
            assert tried.stats().num_workers == 2
    assert first["x"].tolist() == plan.read(0)["x"].tolist()
    expected = [plan.read(number % 10, number // 10)["x"].tolist() for number in range(1, 31)]
    assert [batch["x"].tolist() for batch in batches] == expected


def test_a_plans_loader_is_tried_with_all_its_other_options() -> None:
    plan = penstock.from_arrays({"x": np.arange(40)}).batch(8)
    options = {"micro_batch": 2, "steps": 3, "in_order": False, "drop_consumed": True, "start_method": "fork"}
    with (
        penstock.DataLoader(plan, workers="thread", num_workers=1, **options) as loader,  # type: ignore[arg-type]
        rebuilt(loader, prefetch=16) as tried,
    ):
        assert {name: getattr(tried, name) for name in options} == options
        assert tried.prefetch == 16
        assert len(tried) == len(loader) == 12


def test_a_loader_of_servers_is_tried_with_its_servers() -> None:
    plan = penstock.from_arrays({"x": np.arange(40)}).batch(4)
    with (
        penstock.serve(plan, "127.0.0.1:0", num_workers=1) as server,
        penstock.DataLoader(plan, remote=server.address) as loader,
        rebuilt(loader, prefetch=4) as tried,
    ):
        assert tried.kind == "remote"
        assert len(list(tried)) == 10

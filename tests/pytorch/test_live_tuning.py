"""A loader that finds its settings while it runs: the batches stay the same, and it says what it did."""

from __future__ import annotations

import logging
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock
from penstock.loader import LoaderStatistics
from penstock.pytorch import Bounds, OnlineTuner, Setting, _live_tuning
from penstock.pytorch._live_tuning import LiveTuning


class Steady:
    """A run whose workers compute, whatever is applied."""

    def apply(self, setting: Setting) -> int:
        return 2

    def has_started(self) -> bool:
        return True


STEADY = Steady()


@penstock.pure
def wait_a_little(row: dict[str, Any], rng: Any) -> dict[str, Any]:
    time.sleep(0.001)
    return {**row, "drawn": rng.integers(1 << 30)}


def draw_alone(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "drawn": float(np.random.random())}


def slow_plan(function: Any = wait_a_little) -> penstock.Plan:
    return penstock.from_arrays({"x": np.arange(2000)}).shuffle(seed=3).map(function).batch(8)


def start_with(folder: Path, num_workers: int) -> Path:
    (folder / "start.toml").write_text(f"version = 1\n[loader]\nnum_workers = {num_workers}\n")
    return folder / "start.toml"


def contents(loader: penstock.DataLoader) -> list[tuple[list[int], list[float]]]:
    with loader:
        return [(batch["x"].tolist(), batch["drawn"].tolist()) for batch in loader]


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decides after every other step, whatever the clock says and whether or not workers have started."""
    monkeypatch.setattr(LiveTuning, "_has_started", lambda self: True)
    monkeypatch.setattr(_live_tuning, "_STEPS", 2)
    monkeypatch.setattr(_live_tuning, "_SECONDS", 0.0)


class Restless(OnlineTuner):
    """Changes something after every stretch."""

    def observe(self, stretch: Any, bounds: Any) -> Any:
        assert stretch.num_steps > 0
        assert bounds().most_workers > 0
        workers, depth = self.setting
        self.setting = Setting(1 + (workers + 1) % 4, 1 + (3 * depth) % 5)
        return penstock.pytorch.Decision(self.setting, "restless")


@pytest.mark.parametrize("workers", ["thread", pytest.param("process", marks=pytest.mark.stress)])
@pytest.mark.parametrize("start", [0, pytest.param(3, marks=pytest.mark.stress)])
def test_batches_are_the_same_whatever_is_changed_while_they_are_made(eager, monkeypatch, tmp_path, workers, start):
    plan = slow_plan() if workers == "thread" else slow_plan(draw_alone)
    monkeypatch.setattr("penstock.pytorch._live_tuning.OnlineTuner", Restless)
    loader = penstock.DataLoader(plan, workers=workers, num_workers="auto", settings=start_with(tmp_path, start))
    found = contents(loader)
    assert len(loader.stats().decisions) >= 4
    assert found == contents(penstock.DataLoader(plan, num_workers=0))


def test_a_starving_loader_gets_more_workers_and_says_why(eager, tmp_path, caplog):
    caplog.set_level(logging.INFO, "penstock.pytorch")
    path = start_with(tmp_path, 0)
    loader = penstock.DataLoader(slow_plan(), workers="thread", num_workers="auto", settings=path)
    for _ in loader:
        time.sleep(0.001)
    with loader:
        stats = loader.stats()
    assert stats.num_workers >= 1
    assert "of the time is spent waiting for data" in stats.decisions[0]
    assert stats.decisions[0].startswith("step ")
    assert stats.decisions[0] in caplog.text


def test_a_number_turns_it_off(eager):
    def decisions(change: Any = None, **options: Any) -> tuple[str, ...]:
        with penstock.DataLoader(slow_plan(), workers="thread", **options) as loader:
            if change is not None:
                change(loader)
            for number, _ in enumerate(loader):
                if number > 60:
                    break
            return loader.stats().decisions

    assert decisions(num_workers=1) == ()
    assert decisions(lambda loader: loader.set_workers(1)) == ()
    assert decisions(lambda loader: loader.set_prefetch(3)) == ()
    assert decisions(num_workers=1, prefetch="auto")
    with pytest.raises(ValueError, match="prefetch='deep'; expected an integer of at least 1"):
        penstock.DataLoader(slow_plan(), prefetch="deep")


def test_a_step_that_takes_most_of_a_stretch_is_something_else(monkeypatch):
    statistics, seen = LoaderStatistics(), []
    monkeypatch.setattr(OnlineTuner, "observe", lambda self, stretch, bounds: seen.append(stretch))
    live = LiveTuning(STEADY, statistics, "thread", Setting(1, 2))
    clock = iter(np.arange(0, 1000, 0.05))
    monkeypatch.setattr(_live_tuning.time, "perf_counter", lambda: float(next(clock)))
    live.begin(2)
    for number in range(30):
        statistics.num_batches += 1
        statistics.step_seconds += 5.0 if number == 15 else 0.01
        if number == 15:
            next(clock)
            [next(clock) for _ in range(100)]
        live.step()
    assert len(seen) >= 2
    assert all(stretch.seconds / stretch.num_steps < 0.2 for stretch in seen)
    live.close()


def test_bounds_follow_the_memory_that_is_free(monkeypatch):
    statistics = LoaderStatistics(num_bytes=10 * 50_000_000, num_batches=10)
    live = LiveTuning(STEADY, statistics, "thread", Setting(2, 2))
    monkeypatch.setattr(_live_tuning, "usable_cpus", lambda: 2)
    monkeypatch.setattr(_live_tuning, "available_memory", lambda: 4_000_000_000)
    assert live._bounds() == Bounds(most_workers=8, most_depth=4)
    live.begin(2 * 2 * 4)
    assert live._bounds().most_depth == 1, "of items of four batches"
    monkeypatch.setattr(_live_tuning, "available_memory", lambda: None)
    assert live._bounds() == Bounds(most_workers=8, most_depth=16)
    processes = LiveTuning(STEADY, statistics, "process", Setting(2, 2))
    monkeypatch.setattr(_live_tuning, "available_memory", lambda: 400_000_000)
    assert processes._bounds().most_workers <= 3


class Augmented:
    """A map-style dataset that draws from every global generator."""

    def __len__(self) -> int:
        return 240

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random(), np.random.random(), float(torch.rand(()))])


class Stateful(Augmented):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Settled(OnlineTuner):
    """Changes nothing."""

    def observe(self, stretch: Any, bounds: Any) -> None:
        return None


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_batches_of_a_map_style_dataset_do_not_depend_on_what_is_changed(eager, monkeypatch, tmp_path):
    def epochs(tuner: type[OnlineTuner], start: int) -> tuple[list[torch.Tensor], tuple[str, ...]]:
        monkeypatch.setattr("penstock.pytorch._live_tuning.OnlineTuner", tuner)
        generator = torch.Generator().manual_seed(5)
        loader = penstock.DataLoader(
            Augmented(), 4, shuffle=True, num_workers="auto", settings=start_with(tmp_path, start), generator=generator
        )
        with loader:
            found = [batch for _ in range(2) for batch in loader]
            return found, loader.stats().decisions

    changed, decisions = epochs(Restless, 1)
    fixed, none = epochs(Settled, 2)
    assert len(decisions) > 3
    assert none == ()
    assert len(changed) == len(fixed) == 120
    assert all(torch.equal(one, other) for one, other in zip(changed, fixed, strict=True))
    drawn = torch.cat(fixed)
    assert drawn[:, 1:].unique().numel() > 1000  # not the same numbers in every batch
    plain = penstock.DataLoader(Augmented(), 4, shuffle=True, generator=torch.Generator().manual_seed(5))
    assert torch.equal(torch.cat(list(plain))[:, 0], drawn[:240, 0])


def test_datasets_whose_next_sample_depends_on_workers_want_a_number():
    with pytest.raises(ValueError, match="with a dataset that has a state: what comes next depends on its workers"):
        penstock.DataLoader(Stateful(), num_workers="auto")
    with pytest.raises(ValueError, match="with an iterable dataset"):
        penstock.DataLoader(penstock.stream([__file__], format="text"), num_workers="auto")

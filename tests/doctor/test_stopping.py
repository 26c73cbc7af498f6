"""When a script whose optimizer steps without batches is stopped."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.doctor import Board, Ranks, TrainingWithoutLoader


class Clock:
    """A clock that tests set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


def training(
    tmp_path: Path, *, steps: int | None = None, seconds: float = 120.0
) -> tuple[TrainingWithoutLoader, list[Any]]:
    """Optimizer steps, and the facts that are noted."""
    notes: list[Any] = []
    log: Any = SimpleNamespace(note=lambda fact, **fields: notes.append((fact, fields)))
    settings: Any = {"steps": steps, "seconds": seconds, "full": False}
    unfed = TrainingWithoutLoader(log=log, board=Board(tmp_path / "board"), ranks=Ranks(0, 1), settings=settings)
    return unfed, notes


@pytest.mark.parametrize("batches", [0, 5], ids=["without a loader", "after an epoch that is kept"])
def test_half_a_minute_of_steps_without_a_batch_is_enough(
    batches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    unfed, notes = training(tmp_path)
    for number in range(batches):
        unfed.count(number + 1)
    for _ in range(30):
        clock.now += 1
        unfed.count(batches)
        assert not unfed.is_time_to_stop()
    clock.now += 1
    unfed.count(batches)
    assert unfed.is_time_to_stop()
    assert notes == [("unfed", {"steps": 31 + (batches > 0), "batches": batches})]


def test_many_steps_of_each_batch_are_no_reason_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    unfed, notes = training(tmp_path)
    for batch in range(4):
        for _ in range(25 if batch == 0 else 60):
            clock.now += 1
            unfed.count(batch + 1)
    assert not unfed.is_time_to_stop()
    assert not notes


def test_a_number_of_steps_is_one_of_batches_if_there_are_any(tmp_path: Path) -> None:
    unfed, _ = training(tmp_path, steps=3)
    for _ in range(5):
        unfed.count(1)
    assert not unfed.is_time_to_stop()
    alone, _ = training(tmp_path / ".", steps=3)
    for _ in range(3):
        alone.count(0)
    assert alone.is_time_to_stop()

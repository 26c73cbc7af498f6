"""When a script whose optimizer steps without batches is stopped."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402

from penstock.doctor import Examination, Recorder, ScriptLoader, read_recording  # noqa: E402


class Clock:
    """A clock that tests set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        for name in ("torch", "torch.distributed.checkpoint", "safetensors.torch"):
            for saver in ("save", "save_file", "save_model"):  # a stop replaces them, for good in a real script
                if hasattr(module := sys.modules.get(name), saver):
                    monkeypatch.setattr(module, saver, getattr(module, saver))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def examine(folder: Path, *, steps: int | None = None) -> Examination:
    settings = {"seconds": 120.0, "steps": steps, "full": False, "observe": False, "turn_seconds": 1.0, "doctor": None}
    (folder / "settings.json").write_text(json.dumps(settings))
    return Examination(Recorder(folder))


def batches_of(examination: Examination, count: int) -> Iterator[object]:
    loader = DataLoader(torch.arange(count))
    yield from examination.start_loop(ScriptLoader(loader, 1, "train.py:9"), lambda: iter(loader))


@pytest.mark.parametrize("batches", [0, 5], ids=["without a loader", "after an epoch that is kept"])
def test_half_a_minute_of_steps_without_a_batch_is_enough(batches: int, tmp_path: Path, clock: Clock) -> None:
    examination = examine(tmp_path)
    for _ in batches_of(examination, batches):
        examination.optimizer_stepped()
    if not batches:
        examination.optimizer_stepped()
    for _ in range(30):
        clock.now += 1
        examination.optimizer_stepped()
    clock.now += 1
    with pytest.raises(SystemExit):
        examination.optimizer_stepped()
    (unfed,) = read_recording(tmp_path).of("unfed")
    assert (unfed["steps"], unfed["batches"]) == (32, batches)


def test_many_steps_of_each_batch_are_no_reason_to_stop(tmp_path: Path, clock: Clock) -> None:
    examination = examine(tmp_path)
    for number, _ in enumerate(batches_of(examination, 4)):
        for _ in range(60 if number else 25):
            clock.now += 1
            examination.optimizer_stepped()
    assert not read_recording(tmp_path).has("unfed")


def test_a_number_of_steps_is_one_of_batches_if_there_are_any(tmp_path: Path, clock: Clock) -> None:
    for folder in ("fed", "unfed"):
        (tmp_path / folder).mkdir()
    examination = examine(tmp_path / "fed", steps=3)
    next(batches_of(examination, 4))
    for _ in range(5):
        examination.optimizer_stepped()
    alone = examine(tmp_path / "unfed", steps=3)
    for _ in range(2):
        alone.optimizer_stepped()
    with pytest.raises(SystemExit):
        alone.optimizer_stepped()

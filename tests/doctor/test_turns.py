"""Turns inside a training process: what is served, what is waited for, what counts."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from penstock.doctor import Examination, GroupedSupply, IteratorSupply, Recorder, ScriptLoader, Trial, read_recording

NEVER_ENDING = {"seconds": math.inf, "steps": None, "full": True, "turn_seconds": 0.0001, "doctor": None}


class Slow(IterableDataset[int]):
    """Its second sample takes long."""

    def __iter__(self) -> Iterator[int]:
        yield 0
        time.sleep(2)


class Batches:
    """A source of padded batches of four rows, which counts those that were taken."""

    def __init__(self, count: int) -> None:
        self.num_taken, self._count = 0, count

    def take(self) -> Any:
        if self.num_taken == self._count:
            raise StopIteration
        self.num_taken += 1
        tokens = torch.zeros(4, 16, dtype=torch.long)
        for row, length in enumerate((2, 4, 8, 15)):
            tokens[row, :length] = self.num_taken
        return tokens

    def num_ready(self) -> float:
        return 3.0

    def is_idle(self) -> bool:
        return True

    def close(self) -> None:
        pass


def serve(grouped: GroupedSupply) -> Iterator[Any]:
    while True:
        if not grouped.is_ready:
            grouped.deal()
        try:
            yield grouped.take()
        except StopIteration:
            return


def test_for_each_batch_of_a_group_that_is_served_one_is_loaded() -> None:
    source = Batches(100)
    grouped = GroupedSupply(source, num_batches=8)
    served = serve(grouped)
    for number in range(1, 21):
        next(served)
        assert source.num_taken == 8 + number
    assert grouped.num_ready() == 3


def test_groups_have_all_rows_once_and_less_padding() -> None:
    tokens = list(serve(GroupedSupply(Batches(24), num_batches=8)))
    assert [len(each) for each in tokens] == [4] * 24
    rows = sorted((int(row[0]), int((row != 0).sum())) for each in tokens for row in each)
    assert rows == sorted((number, length) for number in range(1, 25) for length in (2, 4, 8, 15))
    assert sum(each.numel() for each in tokens) < 0.6 * 24 * 4 * 16


@pytest.mark.parametrize(("num_workers", "is_idle"), [(0, True), (1, False)])
def test_who_has_no_workers_is_idle_as_soon_as_a_batch_is_taken(num_workers: int, is_idle: bool) -> None:
    loader = DataLoader(Slow(), batch_size=None, num_workers=num_workers)
    source = IteratorSupply(iter(loader), loader)
    source.take()
    assert source.is_idle() is is_idle
    source.close()


def examine(folder: Path, *, observe: bool) -> Examination:
    (folder / "settings.json").write_text(json.dumps(NEVER_ENDING | {"observe": observe}))
    return Examination(Recorder(folder))


def test_who_is_only_observed_never_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause ends when the loader is idle, so it is asked whether it is."""
    asked: list[object] = []
    monkeypatch.setattr(IteratorSupply, "is_idle", lambda self: asked.append(self) or True)
    loader = DataLoader(torch.arange(40_000), batch_size=4)  # type: ignore[arg-type]
    seconds = iter(range(10_000))
    monkeypatch.setattr(time, "perf_counter_ns", lambda: int(0.01e9) * next(seconds))
    examination = examine(tmp_path, observe=True)
    for number, _ in enumerate(examination.start_loop(ScriptLoader(loader, 1, "train.py:9"), lambda: iter(loader))):
        if number == 1000:
            break
    assert len(list(read_recording(tmp_path).of("turn"))) > 10
    assert asked == []


def test_a_trial_of_fewer_threads_is_served_by_the_scripts_own_loader(tmp_path: Path) -> None:
    loader = DataLoader(torch.arange(8), batch_size=4)  # type: ignore[arg-type]
    examination = examine(tmp_path, observe=False)
    loop = examination.start_loop(ScriptLoader(loader, 1, "train.py:9"), lambda: iter(loader))
    loop.use(Trial(number=2, name="torch.set_num_threads(1)", kind="threads", changes={"num_threads": 1}))
    assert [batch.tolist() for batch in loop] == [[0, 1, 2, 3], [4, 5, 6, 7]]

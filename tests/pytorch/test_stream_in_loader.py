"""Streams in `penstock.DataLoader`: its state is made of theirs."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import StateError

pytestmark = pytest.mark.filterwarnings("ignore:.*more than the:UserWarning", "ignore:This DataLoader will create")


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"n": number}) + "\n" for number in range(200)))
    return tmp_path


def load(folder: Path, num_workers: int, **settings: Any) -> Any:
    stream = penstock.stream(folder, shuffle_buffer=30)
    return penstock.DataLoader(stream, batch_size=8, num_workers=num_workers, **settings)


def values(batches: Any) -> list[list[int]]:
    return [batch["n"].tolist() for batch in batches]


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_loader_goes_on_at_any_batch(numbers: Path, num_workers: int) -> None:
    with load(numbers, num_workers) as loader:
        whole = values(loader)
    assert sorted(itertools.chain(*whole)) == list(range(200))
    for stop in (1, 2, 9, len(whole) - 1, len(whole)):
        with load(numbers, num_workers) as loader:
            begun = values(itertools.islice(loader, stop))
            state = json.loads(json.dumps(loader.state_dict()))
        with load(numbers, num_workers) as later:
            later.load_state_dict(state)
            assert begun + values(later) == whole


def test_epochs_differ_and_can_be_set(numbers: Path) -> None:
    with load(numbers, 2, persistent_workers=True) as loader:
        first, second = values(loader), values(loader)
        assert first != second
        loader.set_epoch(0)
        assert values(loader) == first


def test_another_number_of_workers_is_refused(numbers: Path) -> None:
    with load(numbers, 2) as loader:
        values(itertools.islice(loader, 3))
        state = loader.state_dict()
    with load(numbers, 1) as later, pytest.raises(StateError, match="saved with"):
        later.load_state_dict(state)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("stop", [0, 1, 5, 12])
def test_a_later_epoch_goes_on_and_so_do_those_after_it(numbers: Path, num_workers: int, stop: int) -> None:
    with load(numbers, num_workers) as loader:
        epochs = [values(loader) for _ in range(3)]
    with load(numbers, num_workers) as loader:
        values(loader)
        begun = values(itertools.islice(loader, stop))
        state = loader.state_dict()
    with load(numbers, num_workers) as later:
        later.load_state_dict(state)
        assert begun + values(later) == epochs[1]
        assert values(later) == epochs[2]

"""Streams in `penstock.DataLoader`: its state is made of theirs."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator

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


@pytest.mark.parametrize("buffer", [0, 30])
@pytest.mark.parametrize("stop", [0, 1, 4, 16, 24])
def test_other_ranks_and_workers_go_on_and_each_record_comes_once(numbers: Path, buffer: int, stop: int) -> None:
    found, states = [], None
    for world_size, num_workers, each in ((1, 2, stop), (3, 0, min(1, stop)), (2, 1, 1), (1, 3, None), (2, 0, None)):
        loaders = [
            penstock.DataLoader(
                penstock.stream(numbers, shuffle_buffer=buffer, rank=rank, world_size=world_size),
                batch_size=7,
                num_workers=num_workers,
            )
            for rank in range(world_size)
        ]
        for loader in loaders:
            if states is not None:
                loader.load_state_dict(states)
            found += itertools.chain(*values(itertools.islice(loader, each)))
        if each is None:
            break
        states = json.loads(json.dumps([loader.state_dict() for loader in loaders]))
        states = states if world_size > 1 else states[0]
        for loader in loaders:
            loader.close()
    assert sorted(found) == list(range(200))
    assert len(json.dumps(states)) < 4096 * len(states)


def test_one_ranks_state_is_not_enough_for_another_number_of_ranks(numbers: Path) -> None:
    first = penstock.DataLoader(penstock.stream(numbers, rank=0, world_size=2), batch_size=7)
    next(iter(first))
    alone = penstock.DataLoader(penstock.stream(numbers), batch_size=7)
    alone.load_state_dict(first.state_dict())
    with pytest.raises(StateError, match=r"holds part 0 of 2 .* load the states of all ranks as a list"):
        next(iter(alone))


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


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_state_of_a_later_epoch_or_between_two_does_not_repeat_the_end_of_the_one_before(
    numbers: Path, num_workers: int
) -> None:
    def make() -> Any:
        return load(numbers, num_workers, persistent_workers=num_workers > 0)

    with make() as loader:
        values(loader)
        states = [loader.state_dict()]
        loop = iter(loader)
        states.append(loader.state_dict())  # no worker has begun this epoch
        second = values(itertools.islice(loop, 1))
        states.append(loader.state_dict())  # nor has the second worker
        second += values(loop)
    for state, rest in zip(states, (second, second, second[1:]), strict=True):
        with make() as later:
            later.load_state_dict(state)
            assert values(later) == rest


def test_accelerate_leaves_a_stream_alone_that_splits_itself(numbers: Path) -> None:
    accelerator = Accelerator(cpu=True)
    loader = penstock.DataLoader(penstock.stream(numbers), batch_size=8)
    assert accelerator.prepare(loader) is loader
    whole = penstock.DataLoader(penstock.stream(numbers, rank=0, world_size=1), batch_size=8)
    assert accelerator.prepare(whole) is not whole


RANKS = """
import sys, warnings
from accelerate import Accelerator
from torch.utils.data import DataLoader
import penstock

accelerator = Accelerator(cpu=True)
ours = accelerator.prepare(penstock.DataLoader(penstock.stream(sys.argv[1]), batch_size=8, num_workers=1))
whole = penstock.stream(sys.argv[1], rank=0, world_size=1)
theirs = accelerator.prepare(DataLoader(whole, batch_size=10, num_workers=1))
with warnings.catch_warnings():
    warnings.simplefilter("error")
    mine = [[n for batch in loader for n in batch["n"].tolist()] for loader in (ours, theirs)]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    list(accelerator.prepare(DataLoader(penstock.stream(sys.argv[1]), batch_size=8)))
said = any("splits it once more" in str(each.message) for each in caught)
open(f"{sys.argv[2]}/rank-{accelerator.process_index}", "w").write(repr((mine, said)))
"""


@pytest.mark.stress
def test_two_processes_of_accelerate_read_each_record_once_or_are_warned(numbers: Path, tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    port = str(29500 + os.getpid() % 2000)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port", port]
    subprocess.run([*command, script, numbers / "a.jsonl", tmp_path], check=True, timeout=110, capture_output=True)
    (first, was_first_warned), (second, _) = (eval((tmp_path / f"rank-{rank}").read_text()) for rank in range(2))
    for mine, theirs in zip(first, second, strict=True):
        assert sorted(mine + theirs) == list(range(200))
    assert was_first_warned

from __future__ import annotations

import itertools
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import penstock
from penstock.errors import StateError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    for file in range(3):
        lines = (json.dumps({"n": 100 * file + number}) for number in range(100))
        (tmp_path / f"{file}.jsonl").write_text("\n".join(lines))
    return tmp_path


def values(loader: Any) -> list[int]:
    return [int(n) for batch in loader for n in batch["n"]]


def test_records_batch_with_torchs_own_loader(numbers: Path) -> None:
    stream = penstock.stream(numbers)
    assert isinstance(stream, IterableDataset)
    batches = list(DataLoader(stream, batch_size=64))
    assert torch.equal(torch.cat([batch["n"] for batch in batches]), torch.arange(300))


@pytest.mark.parametrize("num_workers", [0, 1, 3, 8])
def test_every_record_comes_once_over_ranks_and_worker_processes(numbers: Path, num_workers: int) -> None:
    found = []
    for rank in range(2):
        stream = penstock.stream(numbers, shuffle_buffer=16, rank=rank, world_size=2)
        found += values(DataLoader(stream, batch_size=7, num_workers=num_workers))
    assert sorted(found) == list(range(300))


def test_the_rank_is_asked_for_when_iteration_begins(numbers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = penstock.stream(numbers)
    monkeypatch.setenv("WORLD_SIZE", "3")
    found = []
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        found.append([record["n"] for record in stream])
    assert list(itertools.chain(*found)) == list(range(300))
    assert all(found)


def test_a_rank_that_is_known_goes_along_to_workers_and_an_unknown_one_is_left_open(
    numbers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = penstock.stream(numbers)
    assert len(list(pickle.loads(pickle.dumps(stream)))) == 300
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    known, unknown = pickle.loads(pickle.dumps(stream)), stream
    monkeypatch.delenv("RANK")
    assert len(list(known)) < 300
    assert len(list(unknown)) == 300


def test_the_state_is_exact_at_every_record(numbers: Path) -> None:
    whole = [record["n"] for record in penstock.stream(numbers, shuffle_buffer=20)]
    stream = penstock.stream(numbers, shuffle_buffer=20)
    handed_out = []
    for record in stream:
        handed_out.append(record["n"])
        later = penstock.stream(numbers, shuffle_buffer=20)
        later.load_state_dict(json.loads(json.dumps(stream.state_dict())))
        assert handed_out + [record["n"] for record in later] == whole


def test_loading_a_state_moves_an_iterator_that_has_begun(numbers: Path) -> None:
    stream = penstock.stream(numbers)
    first = iter(stream)
    list(itertools.islice(first, 50))
    state = stream.state_dict()
    list(itertools.islice(first, 50))
    stream.load_state_dict(state)
    assert next(first) == {"n": 50}
    fresh = iter(stream)
    stream.load_state_dict(state)
    assert [record["n"] for record in fresh] == list(range(50, 300))


def test_each_pass_is_the_next_epoch_and_a_resumed_run_goes_on_counting(numbers: Path) -> None:
    def make() -> Any:
        return penstock.stream(numbers, shuffle_buffer=50)

    stream = make()
    epochs = [[record["n"] for record in stream] for _ in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    stream = make()
    list(stream)
    begun = list(itertools.islice(stream, 120))
    later = make()
    later.load_state_dict(stream.state_dict())
    assert later.epoch == 1
    assert [record["n"] for record in [*begun, *later]] == epochs[1]
    assert [record["n"] for record in later] == epochs[2]
    later.set_epoch(0)
    assert [record["n"] for record in later] == epochs[0]


def test_the_rest_of_an_epoch_that_was_all_handed_out_is_empty(numbers: Path) -> None:
    stream = penstock.stream(numbers)
    list(stream)
    later = penstock.stream(numbers)
    later.load_state_dict(stream.state_dict())
    assert list(later) == []
    assert (later.epoch, len(list(later))) == (1, 300)


def test_setting_the_epoch_of_a_loaded_state_keeps_it_and_another_epoch_drops_it(numbers: Path) -> None:
    stream = penstock.stream(numbers)
    stream.set_epoch(4)
    list(itertools.islice(stream, 10))
    state = stream.state_dict()
    stream.load_state_dict(state)
    stream.set_epoch(4)
    assert next(iter(stream)) == {"n": 10}
    stream.load_state_dict(state)
    stream.set_epoch(5)
    assert next(iter(stream)) == {"n": 0}
    with pytest.raises(ValueError, match=r"set_epoch\(-1\): epochs count from 0"):
        stream.set_epoch(-1)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_epochs_reach_workers_that_live_on(numbers: Path, method: str) -> None:
    stream = penstock.stream(numbers, shuffle_buffer=50)
    loader = DataLoader(stream, batch_size=10, num_workers=1, persistent_workers=True, multiprocessing_context=method)
    counted = [values(loader), values(loader)]
    assert counted[0] != counted[1]
    stream.set_epoch(0)
    assert [values(loader), values(loader)] == counted
    stream.set_epoch(1)
    assert values(loader) == counted[1]


def test_a_copy_in_the_same_process_counts_epochs_of_its_own(numbers: Path) -> None:
    stream = penstock.stream(numbers)
    stream.set_epoch(3)
    copy = pickle.loads(pickle.dumps(stream))
    list(copy)
    assert (stream.epoch, copy.epoch) == (3, 4)


def test_epochs_are_counted_over_workers_that_do_not_live_on(numbers: Path) -> None:
    stream = penstock.stream(numbers, shuffle_buffer=50)
    loader = DataLoader(stream, batch_size=10, num_workers=2)
    assert values(loader) != values(loader)
    assert stream.epoch == 2


class _StatesOfWorkers(IterableDataset[Any]):
    """Hands out a worker's record together with its state, as a loader that collects states does."""

    def __init__(self, stream: Any, states: dict[int, Any] | None = None) -> None:
        self.stream, self.states = stream, states or {}

    def __iter__(self) -> Iterator[tuple[int, int, Any]]:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        iterator = iter(self.stream)
        if info.id in self.states:
            self.stream.load_state_dict(self.states[info.id])
        for record in iterator:
            yield info.id, record["n"], self.stream.state_dict()


@pytest.mark.parametrize("stop", [0, 1, 40, 199, 299])
def test_states_of_workers_resume_exactly(numbers: Path, stop: int) -> None:
    def run(states: dict[int, Any] | None = None) -> list[tuple[int, int, Any]]:
        dataset = _StatesOfWorkers(penstock.stream(numbers, shuffle_buffer=30), states)
        return list(DataLoader(dataset, batch_size=None, num_workers=3))

    whole = run()
    assert sorted(n for _, n, _ in whole) == list(range(300))
    states = {worker: state for worker, _, state in whole[: stop + 1]}
    resumed = run(states)
    for worker in range(3):
        expected = [n for place, (each, n, _) in enumerate(whole) if each == worker and place > stop]
        assert [n for each, n, _ in resumed if each == worker] == expected
    alone = penstock.stream(numbers, shuffle_buffer=30)
    alone.load_state_dict(whole[0][2])
    with pytest.raises(StateError, match=r"holds part 0 of 3 .* now there are 1"):
        next(iter(alone))


def test_the_trainers_copy_does_not_pretend_to_know_where_workers_are(numbers: Path) -> None:
    stream = penstock.stream(numbers)
    next(iter(DataLoader(stream, batch_size=10, num_workers=1)))
    with pytest.raises(StateError, match="read by the workers of a loader"):
        stream.state_dict()


def test_a_state_that_is_refused_stays_refused(numbers: Path) -> None:
    parts = [penstock.stream(numbers, rank=rank, world_size=2) for rank in range(2)]
    next(iter(parts[0]))
    parts[1].load_state_dict(parts[0].state_dict())
    for _ in range(2):
        with pytest.raises(StateError, match=r"holds part 0 of 2 .* and this is part 1"):
            next(iter(parts[1]))


def test_a_state_loaded_before_the_workers_begin_is_used_once(numbers: Path) -> None:
    first = penstock.stream(numbers)
    list(itertools.islice(first, 10))
    stream = penstock.stream(numbers)
    stream.load_state_dict(first.state_dict())
    loader = DataLoader(stream, batch_size=10, num_workers=1)
    assert [len(values(loader)) for _ in range(3)] == [290, 300, 300]
    stream.set_epoch(0)
    assert len(values(loader)) == 300


def test_a_transform_is_given_each_record_and_the_state_does_not_care(numbers: Path) -> None:
    stream = penstock.stream(numbers, transform=lambda record: torch.tensor(record["n"] * 2))
    list(itertools.islice(stream, 10))
    plain = penstock.stream(numbers)
    plain.load_state_dict(stream.state_dict())
    assert next(iter(plain)) == {"n": 10}
    assert next(iter(DataLoader(stream, batch_size=4))).tolist() == [0, 2, 4, 6]


def test_files_that_leave_workers_without_work_are_named_once(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('x,y\n1,"2\n3"\n')
    stream = penstock.stream(tmp_path, rank=0, world_size=4)
    with pytest.warns(UserWarning, match=r"1 of 1 files must be read from their start.*a\.csv may have newlines"):
        assert list(stream) == [{"x": "1", "y": "2\n3"}]
    assert len(list(stream)) == 1


def test_what_can_be_split_by_bytes_is_not_warned_about(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    reading = penstock.SourceOptions(quoted_newlines=False)
    streams = [penstock.stream(tmp_path, reading=reading, rank=rank, world_size=4) for rank in range(4)]
    assert list(itertools.chain(*streams)) == [{"x": "1", "y": "2"}]


def test_wrong_ranks_are_refused(numbers: Path) -> None:
    with pytest.raises(ValueError, match="both rank and world_size"):
        penstock.stream(numbers, rank=1)
    with pytest.raises(ValueError, match="rank=2 of world_size=2"):
        penstock.stream(numbers, rank=2, world_size=2)


def test_nothing_is_left_open(numbers: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        stream = penstock.stream(numbers)
        next(iter(stream))
        pickle.loads(pickle.dumps(stream))
    del stream
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.stress
@pytest.mark.parametrize("name", ["a.parquet", "a.csv"])
def test_a_stream_that_is_open_when_python_ends_says_nothing(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"n": range(9)}), path)
    else:
        path.write_text("n\n1\n2\n")
    code = "import penstock, sys; records = iter(penstock.stream(sys.argv[1])); next(records)"
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert done.stderr == ""

"""Resuming a loop over a torch dataset equals not stopping."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, Sampler, WeightedRandomSampler

import penstock
from penstock.errors import StateError
from penstock.pytorch import _warnings
from pytorch.torch_examples import Numbers, Repeated, Split, StatefulDataset, StatefulIterator, plain, share


class ShuffledByPython(Sampler[int]):
    """What people write, with the generator that people use."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        indices = list(range(self.length))
        random.shuffle(indices)
        np.random.shuffle(indices)
        return iter(indices)

    def __len__(self) -> int:
        return self.length


class Stateful(Sampler[int]):
    """A sampler with a state of its own."""

    def __init__(self, length: int) -> None:
        self.length, self.place = length, 0

    def __iter__(self) -> Iterator[int]:
        while self.place < self.length:
            self.place += 1
            yield (self.place * 7) % self.length
        self.place = 0

    def __len__(self) -> int:
        return self.length

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class SlowFirst(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(2.0 if index == 0 else 0.0)
        return super().__getitem__(index)


class Counting(Numbers):
    """Gives how many samples this copy of it has given, and the sample."""

    count = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        self.count += 1
        return torch.tensor([self.count, index])

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class KeepsGenerator(Numbers):
    """Its state is that of the global generator."""

    def state_dict(self) -> dict[str, Any]:
        return {"generator": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["generator"])


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


MAP_STYLE: dict[str, Any] = {
    "in order": lambda: {"batch_size": 3},
    "shuffled": lambda: {"batch_size": 3, "shuffle": True},
    "shuffled by a generator": lambda: {"batch_size": 3, "shuffle": True, "generator": seeded(5)},
    "no batches": lambda: {"batch_size": None, "shuffle": True},
    "with replacement": lambda: {"batch_size": 3, "sampler": RandomSampler(Numbers(), replacement=True)},
    "weighted": lambda: {"batch_size": 3, "sampler": WeightedRandomSampler(list(range(20)), 20, generator=seeded(1))},
    "distributed": lambda: {"batch_size": 3, "sampler": DistributedSampler(Numbers(), num_replicas=2, rank=1)},
    "a list": lambda: {"batch_size": 3, "sampler": [5, 3, 8, 1, 2, 0, 9]},
    "batches": lambda: {"batch_sampler": BatchSampler(RandomSampler(Numbers()), 4, True)},
    "a list of batches": lambda: {"batch_sampler": [[1, 2], [3], [4, 5, 6], [7]]},
    "shuffled by python": lambda: {"batch_size": 3, "sampler": ShuffledByPython(20)},
    "stateful": lambda: {"batch_size": 3, "sampler": Stateful(18)},
}


def resumed(state: Any, options: dict[str, Any], dataset: Any = None) -> list[Any]:
    """The rest of the epoch, in a loader that knows nothing else."""
    torch.manual_seed(999)
    random.seed(999)
    np.random.seed(999)
    loader = penstock.DataLoader(Numbers() if dataset is None else dataset, **options)
    loader.load_state_dict(json.loads(json.dumps(state)))
    before = torch.get_rng_state(), random.getstate()
    rest = plain(loader)
    if options.get("generator") is None and not isinstance(options.get("sampler"), (ShuffledByPython, RandomSampler)):
        assert torch.equal(before[0], torch.get_rng_state())  # nothing was drawn that belongs to the user
    assert before[1] == random.getstate()
    return rest


@pytest.mark.parametrize("name", MAP_STYLE)
def test_a_map_style_loop_resumes_at_every_batch_with_any_number_of_workers(name: str) -> None:
    make = MAP_STYLE[name]
    loader = penstock.DataLoader(Numbers(), num_workers=2, **make())
    states, batches = [], []
    loop = iter(loader)
    states.append(loader.state_dict())
    for batch in loop:
        batches.append(batch.tolist())
        states.append(loader.state_dict())
    for position, state in enumerate(states):
        for num_workers in (0, 1) if position == 2 else (0,):
            rest = resumed(state, make() | {"num_workers": num_workers})
            assert rest == batches[position:]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2), st.integers(0, 6), st.integers(0, 2**31), st.booleans())
def test_the_epochs_after_a_resumed_one_are_those_that_would_have_come(
    epoch: int, position: int, seed: int, drop_last: bool
) -> None:
    def make() -> penstock.DataLoader:
        return penstock.DataLoader(Numbers(), 3, True, drop_last=drop_last, generator=seeded(seed))

    loader = make()
    for _ in range(epoch):
        list(loader)
    for _, _ in zip(range(position), loader, strict=False):
        pass
    state = loader.state_dict()
    straight = make()
    expected = [plain(straight) for _ in range(epoch + 3)]
    other = make()
    other.load_state_dict(state)
    rest = plain(other)
    if position:
        assert rest == expected[epoch][position:]
        assert [plain(other), plain(other)] == expected[epoch + 1 :][:2]
    else:
        assert rest == expected[epoch]


@pytest.mark.parametrize("dataset_class", [StatefulIterator, StatefulDataset])
@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("batch_size", [None, 3])
def test_an_iterable_loop_resumes_at_every_batch(dataset_class: Any, num_workers: int, batch_size: int | None) -> None:
    options = {"num_workers": num_workers, "batch_size": batch_size, "collate_fn": torch.tensor}
    loader = penstock.DataLoader(dataset_class(11), **options)
    loop = iter(loader)
    states, batches = [loader.state_dict()], []
    for batch in loop:
        batches.append(batch.tolist())
        states.append(loader.state_dict())
    positions = range(len(states)) if num_workers < 2 else (0, 1, len(states) // 2, len(states) - 1)
    for position in positions:
        state = states[position]
        assert resumed(state, options, dataset_class(11)) == batches[position:]


class GoesBack(StatefulDataset):
    """At its end, it goes back to its beginning, where the next epoch starts."""

    def __iter__(self) -> Iterator[int]:
        numbers = share(self.length)
        while self.place < len(numbers):
            self.place += 1
            yield numbers[self.place - 1]
        self.place = 0


@pytest.mark.parametrize("dataset_class", [GoesBack, StatefulDataset])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dataset_that_ended_within_a_batch_gives_no_more_in_that_epoch(dataset_class: Any, num_workers: int) -> None:
    def make() -> penstock.DataLoader:
        return penstock.DataLoader(dataset_class(5), 4, num_workers=num_workers, persistent_workers=num_workers > 0)

    loader = make()
    batches, states = [], []
    for batch in loader:
        batches.append(batch.tolist())
        states.append(loader.state_dict())
    assert [len(batch) for batch in batches] == ([3, 2] if num_workers else [4, 1])
    for position, state in enumerate(states, 1):
        with make() as other:
            other.load_state_dict(state)
            assert plain(other) == batches[position:]
            assert plain(other) == batches
    at_rest = loader.state_dict()
    with make() as other:
        other.load_state_dict(at_rest)
        assert plain(other) == batches


def test_the_state_of_a_stream_is_that_of_the_batches_handed_over_not_of_those_computed_ahead() -> None:
    loader = penstock.DataLoader(StatefulIterator(100), num_workers=1, prefetch_factor=8)
    loop = iter(loader)
    next(loop)
    next(loop)
    assert loader.state_dict()["workers"] == [{"iterator": {"place": 2}}]


def test_workers_of_a_resumed_stream_take_turns_from_where_they_were() -> None:
    options = {"num_workers": 2, "batch_size": 1}
    loader = penstock.DataLoader(StatefulDataset(9), **options)
    loop = iter(loader)
    seen = plain(next(loop) for _ in range(3))
    state = loader.state_dict()
    assert state["next_worker"] == 1
    assert seen + resumed(state, options, StatefulDataset(9)) == [[n] for n in range(9)]


def test_persistent_workers_resume_in_the_middle_of_their_life() -> None:
    loader = penstock.DataLoader(StatefulDataset(9), num_workers=2, persistent_workers=True)
    loop = iter(loader)
    next(loop)
    state = loader.state_dict()
    expected = plain(loop)
    list(loader)
    loader.load_state_dict(state)
    assert plain(loader) == expected
    assert plain(loader) == [[0], *expected]


@pytest.mark.parametrize("num_batches", [0, 2])
@pytest.mark.parametrize("loads_into_the_same", [True, False])
def test_the_order_of_a_later_epoch_of_persistent_workers_is_resumed(
    num_batches: int, loads_into_the_same: bool
) -> None:
    """They get their seed once, from the generator that the sampler draws from."""

    def make() -> penstock.DataLoader[Any]:
        options = {"batch_size": 4, "shuffle": True, "num_workers": 1, "generator": seeded(3)}
        return penstock.DataLoader(Numbers(12), persistent_workers=True, **options)

    with make() as loader:
        first = [plain(batch) for batch in loader]
        states = [loader.state_dict()]
        second = []
        for batch in loader:
            second.append(plain(batch))
            states.append(loader.state_dict())
        with loader if loads_into_the_same else make() as again:
            again.load_state_dict(states[num_batches])
            assert [plain(batch) for batch in again] == second[num_batches:]
            assert second != first


def test_a_state_is_plain_data_and_survives_being_loaded_and_saved_again() -> None:
    loader = penstock.DataLoader(Numbers(), batch_size=3, shuffle=True)
    loop = iter(loader)
    next(loop)
    state = loader.state_dict()
    other = penstock.DataLoader(Numbers(), batch_size=3, shuffle=True)
    other.load_state_dict(json.loads(json.dumps(state)))
    assert other.state_dict() == state
    assert len(json.dumps(state)) < 16_000


def test_a_loop_that_was_left_is_resumed_only_if_its_state_is_loaded() -> None:
    loader = penstock.DataLoader(Numbers(6), batch_size=2)
    for _ in loader:
        break
    assert plain(loader) == [[0, 1], [2, 3], [4, 5]]
    for _ in loader:
        break
    loader.load_state_dict(loader.state_dict())
    assert plain(loader) == [[2, 3], [4, 5]]
    assert plain(loader) == [[0, 1], [2, 3], [4, 5]]


def test_after_an_error_the_state_is_behind_the_batch_that_failed() -> None:
    class Bad(Numbers):
        def __getitem__(self, index: int) -> torch.Tensor:
            if index == 3:
                raise ValueError("bad")
            return super().__getitem__(index)

    loader = penstock.DataLoader(Bad(8), batch_size=2, num_workers=1)
    loop = iter(loader)
    next(loop)
    with pytest.raises(ValueError, match="bad"):
        next(loop)
    state = loader.state_dict()
    assert resumed(state, {"batch_size": 2}, Bad(8)) == [[4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"batch_size": 4, "shuffle": True}, "batch_size=3; here it is 4"),
        ({"batch_size": 3}, "sampler='RandomSampler'; here it is 'SequentialSampler'"),
        ({"batch_size": 3, "shuffle": True, "generator": seeded(1)}, "0 generators"),
    ],
)
def test_a_state_of_another_order_is_refused(options: dict[str, Any], match: str) -> None:
    loader = penstock.DataLoader(Numbers(), batch_size=3, shuffle=True)
    next(iter(loader))
    state = loader.state_dict()
    with pytest.raises(StateError, match=match):
        penstock.DataLoader(Numbers(), **options).load_state_dict(state)


def test_a_state_of_one_rank_fits_all_ranks_but_no_other_number_of_them() -> None:
    def loader(rank: int, world_size: int, seed: int = 0) -> penstock.DataLoader[Any]:
        sampler: DistributedSampler[Any] = DistributedSampler(Numbers(), world_size, rank, seed=seed)
        return penstock.DataLoader(Numbers(), batch_size=2, sampler=sampler)

    first, second = loader(0, 2), loader(1, 2)
    next(iter(first))
    second.load_state_dict(first.state_dict())
    assert plain(second) == plain(loader(1, 2))[1:]
    with pytest.raises(StateError, match="num_replicas=2; here it is 4"):
        loader(1, 4).load_state_dict(first.state_dict())
    with pytest.raises(StateError, match="seed=0; here it is 7"):
        loader(0, 2, seed=7).load_state_dict(first.state_dict())


def test_states_of_other_data_are_refused() -> None:
    state = penstock.DataLoader(Numbers()).state_dict()
    with pytest.raises(StateError, match="length=20; here it is 19"):
        penstock.DataLoader(Numbers(19)).load_state_dict(state)
    with pytest.raises(StateError, match="kind='map'; here it is 'iterable'"):
        penstock.DataLoader(StatefulDataset()).load_state_dict(state)
    with pytest.raises(StateError, match="version 1 to 2"):
        penstock.DataLoader(Numbers()).load_state_dict({"version": 3})
    plan_state = penstock.DataLoader(penstock.from_arrays({"x": np.arange(4)}).batch(2)).state_dict()
    with pytest.raises(StateError, match="torch dataset"):
        penstock.DataLoader(Numbers()).load_state_dict(plan_state)
    streamed = penstock.DataLoader(StatefulDataset(), num_workers=1).state_dict()
    with pytest.raises(StateError, match="num_workers=1; here it is 2"):
        penstock.DataLoader(StatefulDataset(), num_workers=2).load_state_dict(streamed)


def test_a_sampler_that_gives_fewer_batches_than_the_state_has_passed_is_refused() -> None:
    options: dict[str, Any] = {"sampler": [1, 2, 3, 4]}
    loader = penstock.DataLoader(Numbers(), **options)
    loop = iter(loader)
    for _ in range(3):
        next(loop)
    other = penstock.DataLoader(Numbers(), sampler=[1, 2])
    other.load_state_dict(loader.state_dict())
    with pytest.raises(StateError, match="the sampler gives 2"):
        iter(other)


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("batch_size", [None, 2])
def test_a_dataset_without_a_state_is_read_again_with_a_warning(
    num_workers: int, batch_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With workers even its random numbers come again: they are seeded as they were."""
    options = {"num_workers": num_workers, "batch_size": batch_size}
    loader = penstock.DataLoader(Split(5), **options)
    loop = iter(loader)
    batches, states = [], []
    for batch in loop:
        batches.append(batch)
        states.append(loader.state_dict())
    for position in (1, 3, len(states)):
        monkeypatch.setattr(_warnings, "_said", set())
        other = penstock.DataLoader(Split(5), **options)
        with pytest.warns(UserWarning, match=r"Split has no state_dict\(\): .* read again from the beginning"):
            other.load_state_dict(json.loads(json.dumps(states[position - 1])))
        before = random.getstate()
        rest = iter(other)
        if num_workers:
            assert plain(rest) == plain(batches[position:])
            assert other.state_dict()["position"] is None
        else:
            assert before == random.getstate()
            assert [b[..., 0].tolist() for b in rest] == [b[..., 0].tolist() for b in batches[position:]]
    assert loader.state_dict()["position"] is None


@pytest.mark.parametrize("num_workers", [0, 2])
def test_out_of_order_a_state_knows_which_batches_were_handed_over(num_workers: int) -> None:
    loader = penstock.DataLoader(SlowFirst(12), num_workers=2, in_order=False)
    loop = iter(loader)
    seen = plain(next(loop) for _ in range(4))
    assert [0] not in seen
    rest = resumed(loader.state_dict(), {"num_workers": num_workers, "in_order": False}, SlowFirst(12))
    assert sorted(seen + rest) == [[number] for number in range(12)]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("num_before", [0, 1, 5])
def test_a_map_style_dataset_is_asked_for_its_state_in_every_worker(num_workers: int, num_before: int) -> None:
    def make() -> penstock.DataLoader[Any]:
        return penstock.DataLoader(Counting(), num_workers=num_workers, snapshot_every_n_steps=3)

    loader = make()
    loop = iter(loader)
    for _ in range(num_before):
        next(loop)
    state, expected = loader.state_dict(), plain(loop)
    again = make()
    again.load_state_dict(json.loads(json.dumps(state)))
    assert plain(again) == expected


def test_an_epoch_that_begins_after_a_loaded_state_is_the_one_that_would_have_begun() -> None:
    def make() -> penstock.DataLoader[Any]:
        return penstock.DataLoader(Counting(), shuffle=True, num_workers=1, persistent_workers=True)

    with make() as loader, make() as again:
        list(loader)
        state, expected = loader.state_dict(), plain(loader)
        torch.manual_seed(77)
        again.load_state_dict(json.loads(json.dumps(state)))
        assert plain(again) == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_four_epochs_are_the_same_with_a_new_loader_in_between(num_workers: int) -> None:
    """Also where the dataset's own state is the generator that the sampler draws from, as in torchdata's tests."""

    def make() -> penstock.DataLoader[Any]:
        return penstock.DataLoader(KeepsGenerator(), shuffle=True, num_workers=num_workers)

    def epochs(loader: penstock.DataLoader[Any], count: int) -> list[Any]:
        return [plain(loader) for _ in range(count)]

    torch.manual_seed(0)
    straight = epochs(make(), 4)
    torch.manual_seed(0)
    loader = make()
    first = epochs(loader, 2)
    again = make()
    again.load_state_dict(loader.state_dict())
    assert first + epochs(again, 2) == straight
    assert straight[2] != straight[3]


def test_workers_that_each_had_a_state_cannot_become_more() -> None:
    loader = penstock.DataLoader(Counting(), num_workers=2)
    loop = iter(loader)
    for _ in range(3):
        next(loop)
    with pytest.raises(StateError, match="2 workers whose datasets each had a state of their own; here there are 3"):
        penstock.DataLoader(Counting(), num_workers=3).load_state_dict(loader.state_dict())


def test_a_state_of_version_1_is_still_read() -> None:
    loader = penstock.DataLoader(Numbers(), batch_size=3, shuffle=True)
    loop = iter(loader)
    next(loop)
    state, expected = loader.state_dict() | {"version": 1}, plain(loop)
    assert resumed(state, {"batch_size": 3, "shuffle": True}) == expected


def test_set_epoch_tells_samplers_and_datasets() -> None:
    class Told(Repeated):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    sampler, data = DistributedSampler(Numbers(), num_replicas=1, rank=0), Told()
    loader = penstock.DataLoader(Numbers(), sampler=sampler)
    loader.set_epoch(4)
    penstock.DataLoader(data).set_epoch(5)
    assert (sampler.epoch, data.epoch) == (4, 5)
    loop = iter(loader)
    first = next(loop).tolist()
    sampler.set_epoch(0)
    other = penstock.DataLoader(Numbers(), sampler=DistributedSampler(Numbers(), num_replicas=1, rank=0))
    other.load_state_dict(loader.state_dict())
    assert [first, *plain(other)] == [[index] for index in _order_of_epoch(4)]


def _order_of_epoch(epoch: int) -> list[int]:
    sampler = DistributedSampler(Numbers(), num_replicas=1, rank=0)
    sampler.set_epoch(epoch)
    return list(sampler)


def test_resuming_reads_no_sample_that_was_handed_over() -> None:
    read: list[int] = []

    class Recording(Numbers):
        def __getitem__(self, index: int) -> int:
            read.append(index)
            return index

    loader = penstock.DataLoader(Recording(), batch_size=5)
    loop = iter(loader)
    next(loop)
    next(loop)
    other = penstock.DataLoader(Recording(), batch_size=5)
    other.load_state_dict(loader.state_dict())
    read.clear()
    list(other)
    assert read == list(range(10, 20))

"""The same seeds give torch's batches, bit for bit, and leave the trainer's generators where torch leaves them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import penstock
from pytorch.torch_examples import Augmented, Numbers, Rows, Split, assert_same, both

BATCHINGS = [
    {},
    {"batch_size": 4},
    {"batch_size": 4, "shuffle": True},
    {"batch_size": 4, "shuffle": True, "drop_last": True},
    {"batch_size": None},
    {"batch_size": None, "shuffle": True},
    {"batch_size": 50},
]


def two_epochs(loader_class: Any, dataset: Any, **options: Any) -> list[Any]:
    """Two epochs, and what each global generator gives after each."""
    if options.pop("with_generator", False):
        options["generator"] = torch.Generator().manual_seed(9)
    loader = loader_class(dataset, **options)
    seen = []
    for _ in range(2):
        seen.append(list(loader))
        seen.append([torch.rand(1), np.random.rand(), random.random()])
    if "generator" in options:
        seen.append(torch.rand(1, generator=options["generator"]))
    return seen


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.stress), 2])
@pytest.mark.parametrize("batching", BATCHINGS)
@pytest.mark.parametrize("with_generator", [False, True])
def test_epochs_of_a_map_style_dataset(num_workers: int, batching: dict[str, Any], with_generator: bool) -> None:
    options = {"num_workers": num_workers, "with_generator": with_generator} | batching
    assert_same(*both(lambda loader: two_epochs(loader, Augmented(11), **options)))


@pytest.mark.parametrize("batch_size", [None, 1, 4])
@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_epochs_of_an_iterable_dataset(num_workers: int, batch_size: int | None, drop_last: bool) -> None:
    options = {"num_workers": num_workers, "batch_size": batch_size, "drop_last": drop_last and batch_size is not None}
    assert_same(*both(lambda loader: two_epochs(loader, Split(), **options)))


@pytest.mark.parametrize("persistent", [False, True])
def test_an_iterable_dataset_of_which_one_batch_per_worker_is_prefetched(persistent: bool) -> None:
    options = {"batch_size": 2, "num_workers": 2, "prefetch_factor": 1, "persistent_workers": persistent}
    assert_same(*both(lambda loader: two_epochs(loader, Split(), **options)))


@pytest.mark.parametrize("dataset", [Augmented(11), Split()])
def test_persistent_workers_keep_their_generators_over_epochs(dataset: Any) -> None:
    assert_same(*both(lambda loader: two_epochs(loader, dataset, batch_size=2, num_workers=2, persistent_workers=True)))


@pytest.mark.parametrize(
    "make_sampler",
    [
        lambda data: SequentialSampler(data),
        lambda data: RandomSampler(data, replacement=True, num_samples=70),
        lambda data: RandomSampler(data, num_samples=30, generator=torch.Generator().manual_seed(1)),
        lambda data: SubsetRandomSampler([3, 1, 4, 15, 9, 2, 6]),
        lambda data: WeightedRandomSampler([0.1 * i for i in range(20)], 33),
        lambda data: DistributedSampler(data, num_replicas=3, rank=1, seed=5),
        lambda data: [5, 3, 3, 7],
        lambda data: range(19, 0, -2),
    ],
)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_samplers(make_sampler: Any, num_workers: int) -> None:
    data = Numbers()
    assert_same(
        *both(
            lambda loader: two_epochs(loader, data, sampler=make_sampler(data), batch_size=3, num_workers=num_workers)
        )
    )


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batch_samplers_lists_of_batches_and_getitems(num_workers: int) -> None:
    data = Rows()
    for make in (
        lambda: BatchSampler(RandomSampler(data), 6, False),
        lambda: [[1, 2], [3], [4, 5, 6]],
    ):
        seen = both(lambda loader, make=make: two_epochs(loader, data, batch_sampler=make(), num_workers=num_workers))
        assert_same(*seen)


def test_a_sampler_without_batches_may_give_batches_of_indices() -> None:
    data = TensorDataset(torch.arange(40).reshape(20, 2))
    sampler = BatchSampler(SequentialSampler(data), 6, False)
    assert_same(*both(lambda loader: two_epochs(loader, data, sampler=sampler, batch_size=None, num_workers=2)))


@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(method, marks=pytest.mark.stress) for method in ("forkserver", "spawn"))]
)
def test_start_methods(method: str) -> None:
    ours = list(penstock.DataLoader(Numbers(), batch_size=6, num_workers=1, multiprocessing_context=method))
    context = torch.multiprocessing.get_context(method)
    again = list(penstock.DataLoader(Numbers(), batch_size=6, num_workers=1, multiprocessing_context=context))
    assert_same(ours, list(torch.arange(20).split(6)))
    assert_same(again, ours)


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 30),
    st.integers(1, 9),
    st.integers(1, 2),
    st.integers(1, 4),
    st.booleans(),
    st.integers(0, 2**63 - 1),
)
def test_the_order_of_indices_is_torchs_for_any_seed(
    length: int, batch_size: int, num_workers: int, prefetch_factor: int, drop_last: bool, seed: int
) -> None:
    def order(loader_class: Any) -> list[Any]:
        loader = loader_class(
            Subset(Numbers(100), range(7, 7 + length)),
            batch_size,
            True,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            drop_last=drop_last,
            generator=torch.Generator().manual_seed(seed),
        )
        return [list(loader), len(loader)]

    assert_same(*both(order))


def test_indices_are_drawn_when_torch_draws_them() -> None:
    """A sampler that shares a generator with the training loop sees its draws in the same order."""

    def interleaved(loader_class: Any) -> list[Any]:
        shared = torch.Generator().manual_seed(4)
        sampler = RandomSampler(Numbers(), replacement=True, num_samples=200, generator=shared)
        loader = loader_class(Numbers(), sampler=sampler, batch_size=8, num_workers=2, prefetch_factor=3)
        return [(batch, torch.rand(1, generator=shared)) for batch in loader]

    assert_same(*both(interleaved))


def test_two_loops_at_once_and_nested_loops() -> None:
    def nested(loader_class: Any) -> list[Any]:
        loader = loader_class(Augmented(8), batch_size=3, shuffle=True, num_workers=1)
        zipped = list(zip(loader, loader, strict=True))
        return [zipped, [(outer, list(loader)) for outer in loader]]

    assert_same(*both(nested))


def test_positional_arguments_come_in_torchs_order() -> None:
    def collate(samples: list[Any]) -> Any:
        return samples

    positional = (Numbers(), 3, True, None, None, 1, collate, False, True, 30.0, None, "fork", None)
    assert_same(*both(lambda loader: two_epochs(lambda *_: loader(*positional), None)))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_data_pipes_are_shuffled_and_shared_out_as_by_torch(num_workers: int) -> None:
    from torch.utils.data.datapipes.iter import IterableWrapper
    from torch.utils.data.datapipes.map import SequenceWrapper

    def epochs(loader_class: Any) -> Any:
        pipe = IterableWrapper(range(30)).shuffle().sharding_filter()
        return two_epochs(loader_class, pipe, batch_size=4, shuffle=True, num_workers=num_workers)

    assert_same(*both(epochs))
    mapped = SequenceWrapper(list(range(9)))
    assert_same(*both(lambda loader: two_epochs(loader, mapped, batch_size=4, num_workers=num_workers)))

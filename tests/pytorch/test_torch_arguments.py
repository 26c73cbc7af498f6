"""Arguments and attributes: torch's names, defaults, errors and guards."""

from __future__ import annotations

import copy
import inspect
import multiprocessing
import pickle
import re
from pathlib import Path
from typing import Any, get_origin

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    default_collate,
    default_convert,
)
from torch.utils.data import DataLoader as TorchDataLoader

import penstock
from penstock.plan import Plan
from penstock.pytorch._arguments import ARGUMENTS
from pytorch.examples import expected, numbers, received, rows_of
from pytorch.torch_examples import Numbers, Repeated, Rows, plain


def test_every_parameter_of_torchs_has_its_name_its_place_and_its_default() -> None:
    ours, torchs = (
        list(inspect.signature(loader).parameters.values()) for loader in (penstock.DataLoader, TorchDataLoader)
    )
    for mine, theirs in zip(ours, torchs, strict=False):
        assert (mine.name, mine.kind) == (theirs.name, theirs.kind)
        if mine.name != "num_workers":  # it depends on the dataset, see the next test
            assert mine.default == theirs.default
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in ours[len(torchs) :])


def test_the_documentation_names_every_argument_with_tests_that_exist() -> None:
    here = Path(__file__).parent
    table = (here.parents[1] / "docs" / "drop-in.md").read_text().split("## Arguments")[1].split("## State")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| `")]
    named = {name.strip(" `") for row in rows for name in row[1].split(",")}
    assert set(inspect.signature(penstock.DataLoader).parameters) - named == set()
    tests = "".join(path.read_text() for path in here.glob("test_*.py"))
    for row in rows:
        for part in row[4].split(";"):
            assert all(f"def {name}(" in tests for name in re.findall(r"`(test_\w+)`", part)), row[1]


def test_one_table_knows_every_argument_and_the_documentation_agrees_with_it() -> None:
    assert list(ARGUMENTS) == list(inspect.signature(penstock.DataLoader).parameters)[1:]
    torchs = inspect.signature(TorchDataLoader).parameters
    assert {name for name, argument in ARGUMENTS.items() if argument.is_torchs} == set(torchs) - {"dataset"}
    page = Path(__file__).parents[2] / "docs" / "drop-in.md"
    rows = [line.split("|") for line in page.read_text().splitlines() if line.startswith("| `")]
    for row in rows:
        for name in (name.strip(" `") for name in row[1].split(",") if name.strip(" `") in ARGUMENTS):
            argument = ARGUMENTS[name]
            assert row[2].strip().startswith("refused") == (argument.with_torch is not None), name
            assert argument.with_plan is not None or row[3].strip() != "refused", name


def test_a_torch_dataset_has_no_workers_by_default_and_a_plan_has_some() -> None:
    assert penstock.DataLoader(Numbers()).num_workers == 0
    with penstock.DataLoader(numbers().batch(4)) as loader:
        next(iter(loader))
        assert loader.stats().num_workers > 0


ATTRIBUTES = [
    "dataset",
    "batch_size",
    "num_workers",
    "pin_memory",
    "drop_last",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
    "collate_fn",
    "_dataset_kind",
    "_auto_collation",
    "_IterableDataset_len_called",
    "_iterator",
]


def test_it_takes_a_type_argument_as_annotations_of_typed_scripts_give_it() -> None:
    assert get_origin(penstock.DataLoader[torch.Tensor]) is penstock.DataLoader
    assert len(penstock.DataLoader[torch.Tensor](Numbers(3))) == 3


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_size": 4, "shuffle": True, "num_workers": 2, "persistent_workers": True, "drop_last": True},
        {"batch_size": None, "num_workers": 1, "timeout": 3, "pin_memory": True},
        {"batch_sampler": [[1], [2]], "num_workers": 1, "prefetch_factor": 5, "in_order": False},
        {"num_workers": 1, "multiprocessing_context": "spawn", "generator": torch.Generator()},
    ],
)
def test_attributes_are_torchs(options: dict[str, Any]) -> None:
    data = Numbers()
    ours, torchs = penstock.DataLoader(data, **options), TorchDataLoader(data, **options)
    assert isinstance(ours, TorchDataLoader)
    for name in ATTRIBUTES:
        assert getattr(ours, name) == getattr(torchs, name), name
    assert type(ours.sampler) is type(torchs.sampler)
    assert type(ours.batch_sampler) is type(torchs.batch_sampler)
    assert type(ours._index_sampler) is type(torchs._index_sampler)
    assert len(ours) == len(torchs)


def test_defaults_of_samplers_and_collate_functions_are_torchs() -> None:
    loader = penstock.DataLoader(Numbers(), shuffle=True)
    assert isinstance(loader.sampler, RandomSampler)
    assert isinstance(loader.batch_sampler, BatchSampler)
    assert loader.collate_fn is default_collate
    single = penstock.DataLoader(Numbers(), batch_size=None)
    assert isinstance(single.sampler, SequentialSampler)
    assert single.collate_fn is default_convert


@pytest.mark.parametrize(
    "name", ["batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"]
)
def test_what_torch_forbids_to_set_later_is_forbidden(name: str) -> None:
    for loader in (penstock.DataLoader(Numbers()), penstock.DataLoader(numbers().batch(4))):
        with pytest.raises(ValueError, match=f"{name} attribute should not be set after DataLoader is initialized"):
            setattr(loader, name, None)


def test_what_torch_lets_one_set_later_is_taken_by_the_next_loop() -> None:
    loader = penstock.DataLoader(Numbers(4), batch_size=2)
    loader.collate_fn = lambda samples: len(samples)
    loader.num_workers, loader.prefetch_factor = 1, 1
    assert list(loader) == [2, 2]


WRONG: list[dict[str, Any]] = [
    {"num_workers": -1},
    {"timeout": -1},
    {"prefetch_factor": 2},
    {"num_workers": 1, "prefetch_factor": -2},
    {"persistent_workers": True},
    {"sampler": [1], "shuffle": True},
    {"batch_sampler": [[1]], "batch_size": 3},
    {"batch_sampler": [[1]], "shuffle": True},
    {"batch_sampler": [[1]], "sampler": [1]},
    {"batch_sampler": [[1]], "drop_last": True},
    {"batch_size": None, "drop_last": True},
    {"batch_size": 0},
    {"batch_size": 2.5},
    {"drop_last": "yes"},
    {"num_workers": 1, "multiprocessing_context": "exec"},
    {"num_workers": 1, "multiprocessing_context": 3},
    {"multiprocessing_context": "fork"},
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_wrong_arguments_raise_torchs_errors(wrong: dict[str, Any]) -> None:
    _raises_the_same(Numbers(), wrong)


@pytest.mark.parametrize("wrong", [{"shuffle": True}, {"sampler": [1]}, {"batch_sampler": [[1]]}], ids=str)
def test_wrong_arguments_for_iterable_datasets_raise_torchs_errors(wrong: dict[str, Any]) -> None:
    _raises_the_same(Repeated(), wrong)


def _raises_the_same(dataset: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(Exception) as torchs:
        TorchDataLoader(dataset, **wrong)
    with pytest.raises(type(torchs.value)) as ours:
        penstock.DataLoader(dataset, **wrong)
    assert str(ours.value) == str(torchs.value)


def test_a_shuffled_dataset_without_samples_is_refused_as_torch_refuses_it() -> None:
    for loader in (penstock.DataLoader, TorchDataLoader):
        with pytest.raises(ValueError, match="num_samples should be a positive integer"):
            loader(Numbers(0), shuffle=True)
        assert list(loader(Numbers(0), num_workers=1)) == []


def test_a_prefetch_factor_of_0_is_refused_when_the_loop_begins() -> None:
    with pytest.raises(AssertionError, match="prefetch_factor must be greater than 0"):
        iter(penstock.DataLoader(Numbers(), num_workers=1, prefetch_factor=0))


def test_a_timeout_without_workers_is_refused_when_the_loop_begins() -> None:
    for loader in (penstock.DataLoader, TorchDataLoader):
        with pytest.raises(AssertionError, match="timeout == 0"):
            iter(loader(Numbers(), timeout=1))


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"workers": "thread"}, "'thread' is for plans"),
        ({"prefetch": "auto"}, "goes with num_workers='auto'"),
        ({"prefetch": 3}, "use prefetch_factor"),
        ({"rank": 0, "world_size": 2}, "use sampler=DistributedSampler"),
        ({"micro_batch": 3}, "is for plans"),
        ({"epochs": None}, "a loop around the loop"),
        ({"start_method": "spawn"}, "use multiprocessing_context"),
    ],
)
def test_arguments_of_plans_are_refused_for_torch_datasets(wrong: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        penstock.DataLoader(Numbers(), **wrong)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"batch_size": 3}, r"plan.batch\(3\)"),
        ({"shuffle": True}, r"ds.shuffle\(seed=7\)"),
        ({"sampler": [1]}, "the plan is the order"),
        ({"batch_sampler": [[1]]}, "what a batch is"),
        ({"collate_fn": len}, "batched=True"),
        ({"drop_last": True}, "tail='drop'"),
        ({"worker_init_fn": print}, "no state"),
        ({"multiprocessing_context": "fork"}, "start_method"),
        ({"generator": torch.Generator()}, "its seed"),
    ],
)
def test_arguments_of_torch_that_a_plan_decides_are_refused(wrong: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        penstock.DataLoader(numbers().batch(4), **wrong)
    assert penstock.DataLoader(numbers().batch(4), shuffle=False, batch_size=1, drop_last=False, timeout=0) is not None


def test_numbers_for_a_plan_may_be_numpys() -> None:
    options = {"num_workers": np.int64(1), "prefetch_factor": np.int32(3), "epochs": np.int64(2)}
    loader = penstock.DataLoader(plan := numbers().batch(8), workers="thread", **options)  # type: ignore[arg-type]
    assert received(loader) == expected(plan) + expected(plan, epoch=1)
    assert loader.stats().prefetch == 3


def test_workers_of_a_torch_dataset_cannot_change_while_it_runs() -> None:
    loader = penstock.DataLoader(Numbers(), num_workers=1)
    with pytest.raises(ValueError, match="have state"):
        loader.set_workers(2)
    with pytest.raises(ValueError, match="prefetch_factor"):
        loader.set_prefetch(2)
    assert (loader.kind, penstock.DataLoader(Numbers()).kind) == ("process", "inline")


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_copies_of_a_loader_begin_anew(duplicate: Any) -> None:
    loader = penstock.DataLoader(Numbers(4), batch_size=2, num_workers=1, persistent_workers=True)
    loop = iter(loader)
    next(loop)
    vars(loader)["__pl_attrs_record"] = [(("_iterator", loop), "set")]  # as Lightning notes it
    other = duplicate(loader)
    assert plain(other) == [[0, 1], [2, 3]]
    assert plain(loop) == [[2, 3]]
    other.close()
    loader.close()
    planned = penstock.DataLoader(numbers(4).batch(2), num_workers=0)
    planned_too = duplicate(planned)
    assert rows_of(planned_too) == [0, 1, 2, 3]
    planned_too.batch_sampler.sampler.set_epoch(3)
    planned.batch_sampler.sampler.set_epoch(5)
    assert (planned_too.state_dict()["epoch"], planned.state_dict()["epoch"]) == (3, 5)


# Penstock's own data.


def test_a_penstock_dataset_with_torchs_arguments_is_a_plan() -> None:
    data = numbers(10)
    loader = penstock.DataLoader(data, batch_size=4, shuffle=True, drop_last=True, num_workers=1)
    assert loader.kind == "thread"
    assert received(loader) == expected(data.shuffle(seed=0, mode="full").batch(4, tail="drop"))
    assert (loader.batch_size, loader.dataset) == (4, data)
    short = penstock.DataLoader(data, 4, generator=torch.Generator().manual_seed(3), shuffle=True, num_workers=0)
    assert received(short) == expected(data.shuffle(seed=3, mode="full").batch(4, tail="short"))
    assert rows_of(penstock.DataLoader(data, num_workers=0)) == list(range(10))


def test_each_rank_of_a_penstock_dataset_gets_batch_size_samples_of_its_own() -> None:
    data, seen = numbers(12), []
    for rank in range(2):
        loader = penstock.DataLoader(data, batch_size=3, shuffle=True, num_workers=0, rank=rank, world_size=2)
        assert [len(batch["x"]) for batch in loader] == [3, 3]
        seen += rows_of(penstock.DataLoader(data, 3, True, num_workers=0, rank=rank, world_size=2))
    assert sorted(seen) == list(range(12))


def test_ranks_that_meet_after_the_loader_was_made_share_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = penstock.DataLoader(numbers(12), batch_size=3, num_workers=0)
    assert len(loader) == 4
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert len(loader) == 2
    assert [batch["x"].tolist() for batch in loader] == [[1, 3, 5], [7, 9, 11]]


def test_a_penstock_dataset_with_python_per_sample_is_a_map_style_dataset() -> None:
    data = numbers(6)
    for options in ({"sampler": [3, 1]}, {"batch_sampler": [[3, 1]]}, {"batch_size": None, "sampler": [3, 1]}):
        batches = list(
            penstock.DataLoader(data, **{"batch_size": 2} | options if "batch_sampler" not in options else options)
        )
        assert torch.cat([batch["x"].reshape(-1) for batch in batches]).tolist() == [3, 1]
    collated = penstock.DataLoader(data, batch_size=3, collate_fn=lambda samples: [int(s["x"]) for s in samples])
    assert list(collated) == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ValueError, match="worker_init_fn"):
        penstock.DataLoader(data.batch(2), worker_init_fn=print)


def test_a_plans_loader_shows_torchs_attributes() -> None:
    plan = numbers(12).shuffle(seed=1).batch(4)
    loader = penstock.DataLoader(plan, num_workers=2, rank=0, world_size=2)
    assert isinstance(loader, TorchDataLoader)
    assert isinstance(loader.sampler, DistributedSampler)
    assert (loader.dataset, loader.batch_size) == (plan, 2)
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (0, None, False)
    assert len(loader) == len(loader.batch_sampler) == 3  # type: ignore[arg-type]
    assert len(loader.sampler) == 6
    assert isinstance(loader.dataset, Plan)
    loader.sampler.set_epoch(5)
    assert loader.state_dict()["epoch"] == 5


def test_a_loader_that_is_rebuilt_from_the_attributes_of_another_runs_the_same_plan() -> None:
    for first in (
        penstock.DataLoader(numbers(12).shuffle(seed=1).batch(4), num_workers=2, prefetch=3),
        penstock.DataLoader(numbers(12), batch_size=4, shuffle=True, drop_last=True, num_workers=1),
    ):
        names = set(inspect.signature(penstock.DataLoader).parameters) & set(dir(first)) - {"batch_sampler"}
        again = penstock.DataLoader(**{name: getattr(first, name) for name in names})
        assert received(again) == received(first)
        assert again.kind == first.kind == "thread"
        again.close()


def test_prefetch_factor_of_a_plan_is_per_worker() -> None:
    with penstock.DataLoader(numbers(400).batch(4), workers="thread", num_workers=2, prefetch_factor=5) as loader:
        next(iter(loader))
        assert loader.stats().prefetch == 10


def test_datasets_with_getitems_are_asked_for_batches() -> None:
    assert [batch[0].tolist() for batch in penstock.DataLoader(Rows(6), batch_size=3)] == [[0, 3], [3, 3]]


def test_the_default_start_method_is_the_interpreters() -> None:
    assert multiprocessing.get_start_method() == "fork"
    secret = object()

    class Local(Numbers):
        def __getitem__(self, index: int) -> int:
            return id(secret)

    assert next(iter(penstock.DataLoader(Local(), num_workers=1))).item() == id(secret)


def test_a_dataset_that_cannot_be_sent_to_a_spawned_worker_says_so() -> None:
    class Local(Numbers):
        pass

    loader = penstock.DataLoader(Local(), num_workers=1, multiprocessing_context="spawn")
    with pytest.raises((TypeError, AttributeError), match="Local"):
        iter(loader)
    assert np.array_equal(next(iter(penstock.DataLoader(Local()))), [0])


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is one here")
def test_a_device_that_is_not_there_is_refused_at_once() -> None:
    for data in (Numbers(), numbers().batch(4)):
        with pytest.raises(RuntimeError, match="finds no accelerator here"):
            penstock.DataLoader(data, device="cuda")
        assert len(list(penstock.DataLoader(data, device="cpu"))) > 0

"""Warnings: each once, in words, and only where it is true."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import IterableDataset, get_worker_info

import penstock
from penstock.pytorch import _warnings
from pytorch.examples import numbers
from pytorch.torch_examples import Numbers, Repeated, Split, StatefulIterator


@pytest.fixture(autouse=True)
def _nothing_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_warnings, "_said", set())


def said(action: Any) -> list[str]:
    """What an action warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(warning.message) for warning in caught]


def test_more_workers_than_processors_are_warned_of_once_at_the_users_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_warnings, "usable_cpus", lambda: 2)
    with pytest.warns(
        UserWarning, match="will create 3 worker processes in total, but this job may use only 2"
    ) as caught:
        penstock.DataLoader(Numbers(), num_workers=3)
    assert caught[0].filename == __file__
    assert "num_workers=1 or 2 is likely to be faster" in str(caught[0].message)
    assert said(lambda: list(penstock.DataLoader(Numbers(), num_workers=3))) == []
    assert said(lambda: penstock.DataLoader(Numbers(), num_workers=2)) == []
    plan = numbers().batch(8)
    assert len(said(lambda: penstock.DataLoader(plan, workers="process", num_workers=5))) == 1
    assert said(lambda: penstock.DataLoader(plan, workers="thread", num_workers=6)) == []


def test_an_odd_batch_size_is_a_line_of_the_log_and_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "penstock")
    for size in (1, 7, 8, 32):
        penstock.DataLoader(Numbers(), batch_size=size)
    assert not caplog.messages
    assert said(lambda: penstock.DataLoader(Numbers(), batch_size=33)) == []
    assert said(lambda: penstock.DataLoader(numbers(200).batch(35))) == []
    assert [message.split(",")[0] for message in caplog.messages] == [
        "batch_size=33 is not a multiple of 8",
        "batch_size=35 is not a multiple of 8",
    ]


def test_pinning_without_an_accelerator_is_warned_of_in_torchs_words() -> None:
    loader = penstock.DataLoader(Numbers(4), pin_memory=True, pin_memory_device="cuda")
    messages = said(lambda: list(loader))
    assert any(message.startswith("'pin_memory' argument is set as true but no accelerator") for message in messages)
    assert any(message.startswith("pin_memory_device is deprecated") for message in messages)
    assert said(lambda: list(loader)) == []


def test_a_dataset_that_takes_seconds_to_send_is_warned_of() -> None:
    loader = penstock.DataLoader(SlowToPickle(), num_workers=1, multiprocessing_context="forkserver")
    (message,) = said(lambda: list(loader))
    assert message.startswith("Sending SlowToPickle to the workers took 2.")
    assert "keep the data in a few arrays" in message
    assert said(lambda: list(penstock.DataLoader(SlowToPickle(), num_workers=1))) == []  # forked


class SlowToPickle(Numbers):
    """Takes its time."""

    def __init__(self) -> None:
        super().__init__(2)

    def __getstate__(self) -> dict[str, Any]:
        time.sleep(2.1)
        return vars(self)


class ByProcess(IterableDataset[int]):
    """Splits by something else than the worker info."""

    def __iter__(self) -> Iterator[int]:
        return iter([os.getpid()] * 4)


class Aware(IterableDataset[int]):
    """Asks, and begins with the same all the same."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        yield 0
        yield 0 if info is None else info.id


def test_an_iterable_dataset_that_every_worker_repeats_is_warned_of_once() -> None:
    messages = said(lambda: list(penstock.DataLoader(Repeated(), batch_size=2, num_workers=2)))
    assert len(messages) == 1
    assert "began with the same batches, and Repeated did not ask" in messages[0]
    assert "get_worker_info().id" in messages[0]
    assert said(lambda: list(penstock.DataLoader(Repeated(), batch_size=2, num_workers=2))) == []


@pytest.mark.parametrize("dataset", [Split(), StatefulIterator(), ByProcess(), Aware()])
def test_an_iterable_dataset_that_does_not_repeat_is_not_warned_of(dataset: Any) -> None:
    assert said(lambda: list(penstock.DataLoader(dataset, num_workers=2))) == []


def test_a_worker_init_fn_may_split_the_dataset() -> None:
    def take_share(worker: int) -> None:
        pass

    loader = penstock.DataLoader(Repeated(), num_workers=2, worker_init_fn=take_share)
    assert said(lambda: list(loader)) == []
    assert said(lambda: list(penstock.DataLoader(Repeated(), num_workers=1))) == []

"""Which device is meant, and torch's own streams and events as far as they go without an accelerator."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from penstock.pytorch._device import BlockingAccelerator, StreamAccelerator, find_device
from penstock.pytorch._feed import DeviceFeed, make_feed
from pytorch.fake_device import Slots

needs_no_accelerator = pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator here")
needs_accelerator = pytest.mark.skipif(not torch.accelerator.is_available(), reason="there is no accelerator here")


@pytest.mark.parametrize("device", [None, "cpu", "cpu:0", torch.device("cpu")])
def test_on_the_cpu_batches_are_handed_over_as_they_are(device: Any) -> None:
    assert find_device(device) is None
    num_threads = threading.active_count()
    assert make_feed(Slots(1), device=find_device(device), pin_memory=False) is None
    assert threading.active_count() == num_threads


@needs_no_accelerator
@pytest.mark.parametrize("device", ["cuda", "cuda:1", "xpu", "mps", "meta", torch.device("cuda")])
def test_a_device_that_is_not_there_is_refused(device: Any) -> None:
    with pytest.raises(RuntimeError, match=f"device='{device}' is not available: torch .* finds no accelerator here"):
        find_device(device)


@needs_no_accelerator
def test_a_number_without_an_accelerator_is_refused() -> None:
    with pytest.raises(RuntimeError, match="accelerator"):
        find_device(0)


def test_a_word_that_is_no_device_is_refused_by_torch() -> None:
    with pytest.raises(RuntimeError, match="device type"):
        find_device("gpu")


@pytest.mark.parametrize(("device", "message"), [("xpu", "finds the accelerator 'cuda' here"), ("cuda:2", "finds 2 ")])
def test_another_accelerator_or_number_than_is_there_is_refused(
    device: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    with pytest.raises(RuntimeError, match=message):
        find_device(device)
    assert find_device("cuda:1") == torch.device("cuda:1")


def test_a_device_without_streams_gets_whole_copies_in_order() -> None:
    source = Slots(20)
    feed = DeviceFeed(source, BlockingAccelerator(torch.device("meta")))
    for step in range(20):
        token, batch = feed.next()
        assert (token, batch["x"].device.type, batch["x"].shape) == (step, "meta", (16,))
    assert feed.next() is None
    feed.close()
    assert source.num_slots <= 3


def test_torch_has_every_name_that_is_used() -> None:
    for name in ("current_accelerator", "current_stream", "current_device_index", "set_device_index", "device_count"):
        assert callable(getattr(torch.accelerator, name))
    stream = torch.Stream(device="cpu")
    again = torch.Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)
    assert again == stream
    event = torch.Event(torch.device("cpu"), blocking=True)
    again.wait_event(event)
    event.synchronize()


@needs_accelerator
def test_on_an_accelerator_batches_arrive_whole_and_stay_so() -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    source = Slots(200, width=4096)
    feed = DeviceFeed(source, StreamAccelerator(device))
    held = []
    for _ in range(200):
        _, batch = feed.next()
        held.append((batch["x"], batch["x"] + 0))
    feed.close()
    for step, (batch, used) in enumerate(held):
        assert batch.tolist() == used.tolist() == source.values(step)

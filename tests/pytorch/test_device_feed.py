"""The way to the device, on a device that shows every early read and every late overwrite."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.pytorch._feed import DeviceFeed
from pytorch.fake_device import FakeDevice, Slots
from waiting import wait_until

SECONDS = st.integers(1, 9).map(float)


def train(
    device: FakeDevice, source: Slots, step_seconds: float, *, syncs: bool, holds: bool = False
) -> tuple[list[list[int]], list[Any]]:
    """What the kernels of each step read, and the batches if they are held."""
    feed = DeviceFeed(source, device)
    reads, held = [], []
    while (found := feed.next()) is not None:
        token, batch = found
        assert token == len(reads)
        reads.append(device.run_kernel(batch["x"], step_seconds))
        if syncs:
            device.advance_to(device.compute.end)
        if holds:
            held.append(batch)
        del found, batch
    feed.close()
    device.synchronize()
    return reads, held


@pytest.mark.parametrize("syncs", [True, False], ids=["host waits each step", "host runs ahead"])
@given(num_batches=st.integers(1, 12), copy_seconds=SECONDS, step_seconds=SECONDS)
@settings(deadline=None, max_examples=50)
def test_copies_overlap_with_steps_as_far_as_is_possible(
    syncs: bool, num_batches: int, copy_seconds: float, step_seconds: float
) -> None:
    device = FakeDevice(copy_seconds)
    train(device, Slots(num_batches), step_seconds, syncs=syncs)
    longest = max(copy_seconds, step_seconds)
    assert device.now == copy_seconds + (num_batches - 1) * longest + step_seconds


@pytest.mark.parametrize("syncs", [True, False], ids=["host waits each step", "host runs ahead"])
@given(num_batches=st.integers(1, 20), copy_seconds=SECONDS, step_seconds=SECONDS)
@settings(deadline=None, max_examples=50)
def test_nothing_is_read_early_and_nothing_overwritten_late(
    syncs: bool, num_batches: int, copy_seconds: float, step_seconds: float
) -> None:
    device, source = FakeDevice(copy_seconds), Slots(num_batches)
    reads, _ = train(device, source, step_seconds, syncs=syncs)
    assert device.faults == []
    assert reads == [source.values(step) for step in range(num_batches)]


@pytest.mark.parametrize("syncs", [True, False], ids=["host waits each step", "host runs ahead"])
def test_batches_that_the_user_holds_stay_as_they_are(syncs: bool) -> None:
    device, source = FakeDevice(2.0), Slots(120)
    _, held = train(device, source, 1.0, syncs=syncs, holds=True)
    assert [batch["x"].tolist() for batch in held] == [source.values(step) for step in range(120)]
    assert device.num_device_blocks >= 120


@pytest.mark.parametrize(
    ("copy_seconds", "step_seconds"), [(1.0, 50.0), (50.0, 1.0)], ids=["slow steps", "slow copies"]
)
def test_a_host_that_runs_ahead_needs_no_more_memory_than_a_few_batches(
    copy_seconds: float, step_seconds: float
) -> None:
    device, source = FakeDevice(copy_seconds), Slots(200)
    train(device, source, step_seconds, syncs=False)
    assert device.num_device_blocks <= 5
    assert device.num_pinned_blocks <= 6
    assert source.num_slots <= 4


def test_the_next_copy_has_begun_when_a_batch_is_handed_over() -> None:
    device = FakeDevice(3.0)
    feed = DeviceFeed(Slots(9), device)
    for step in range(8):
        feed.next()
        assert device.side.end == 3.0 * (step + 2)
    feed.close()


def test_a_batch_that_is_there_does_not_wait_for_one_that_is_not() -> None:
    source = Slots(3, ready=lambda step: False)
    feed = DeviceFeed(source, FakeDevice())
    assert feed.next()[0] == 0
    assert source.num_asked == 1
    assert [feed.next()[0], feed.next()[0], feed.next()] == [1, 2, None]
    feed.close()


def test_the_last_batches_come_after_the_source_has_ended() -> None:
    feed = DeviceFeed(Slots(3), FakeDevice())
    assert [feed.next()[0] for _ in range(3)] == [0, 1, 2]
    assert feed.next() is None
    assert feed.next() is None
    feed.close()


class FailsAt(Slots):
    """Fails once at step 4, and goes on when it is asked again."""

    def make(self, step: int) -> Any:
        if step == 4:
            raise LookupError("step four is odd")
        return super().make(step)


def test_an_error_comes_after_the_batches_before_it_and_the_source_may_go_on() -> None:
    device, source = FakeDevice(), FailsAt(7)
    feed = DeviceFeed(source, device)
    assert [feed.next()[0] for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(LookupError, match="step four is odd"):
        feed.next()
    assert [feed.next()[0] for _ in range(2)] == [5, 6]
    assert feed.next() is None
    feed.close()


class InterruptedAt(Slots):
    """A Ctrl-C that comes while step 2 is fetched."""

    def make(self, step: int) -> Any:
        if step == 2 and self.num_asked == 3:
            self.num_asked = 2
            self.make = super().make  # type: ignore[method-assign]
            raise KeyboardInterrupt
        return super().make(step)


def test_a_ctrl_c_comes_at_once_and_loses_no_batch() -> None:
    feed = DeviceFeed(InterruptedAt(6), FakeDevice())
    with pytest.raises(KeyboardInterrupt):
        feed.next()
    assert [feed.next()[0] for _ in range(6)] == list(range(6))
    feed.close()


def test_after_close_it_refuses() -> None:
    feed = DeviceFeed(Slots(4), FakeDevice())
    feed.next()
    feed.close()
    feed.close()
    with pytest.raises(RuntimeError, match="This loop was closed"):
        feed.next()


def test_close_lets_go_of_what_was_not_handed_over_and_ends_the_thread() -> None:
    device = FakeDevice()
    feed = DeviceFeed(Slots(9), device)
    _, batch = feed.next()
    assert device.num_leased > 1
    feed.close()
    wait_until(lambda: not any(thread.name.startswith("penstock-pin") for thread in threading.enumerate()))
    wait_until(lambda: device.num_leased == 1)
    assert batch["x"].shape == (16,)


def test_closing_early_leaves_no_copy_that_overwrites_anything() -> None:
    device, source = FakeDevice(5.0), Slots(10)
    first = DeviceFeed(source, device)
    _, batch = first.next()
    read = device.run_kernel(batch["x"], 7.0)
    first.close()
    del batch
    second = DeviceFeed(source, device)
    token, batch = second.next()
    read_later = device.run_kernel(batch["x"], 7.0)
    second.close()
    device.synchronize()
    assert device.faults == []
    assert read == source.values(0)
    assert read_later == source.values(token)


class Opaque:
    """A batch type that moves itself, and hides its tensors."""

    def __init__(self, device: FakeDevice, tensor: Any) -> None:
        self._device, self._tensor = device, tensor

    def pin_memory(self) -> Opaque:
        return Opaque(self._device, self._device.pin(self._tensor))

    def to(self, device: Any, non_blocking: bool = False) -> Opaque:
        assert non_blocking
        return Opaque(self._device, self._device.copy(self._tensor))

    def run(self, seconds: float) -> list[int]:
        return self._device.run_kernel(self._tensor, seconds)


def test_a_batch_whose_tensors_cannot_be_found_is_safe_too() -> None:
    device = FakeDevice(3.0)

    class Source(Slots):
        def make(self, step: int) -> Any:
            return [Opaque(device, super().make(step)["x"])]

    source = Source(30)
    feed = DeviceFeed(source, device)
    reads = []
    while (found := feed.next()) is not None:
        reads.append(found[1][0].run(5.0))
        del found
    feed.close()
    device.synchronize()
    assert device.faults == []
    assert reads == [source.values(step) for step in range(30)]

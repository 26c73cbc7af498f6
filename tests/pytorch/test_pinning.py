"""Pinning in the background: the same batches, in order, and a thread that ends whatever happens."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import warnings
from typing import Any

import pytest
import torch

from penstock.pytorch import _warnings
from penstock.pytorch._feed import PinningFeed, make_feed, wants_pinning
from pytorch.fake_device import FakeDevice, Slots
from waiting import wait_until


def pinning_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("penstock-pin")]


def nothing_runs() -> bool:
    return not pinning_threads()


class Cloning:
    """Pinning that copies, and knows where it was done."""

    def __init__(self) -> None:
        self.threads: set[str] = set()

    def enter_thread(self) -> None:
        self.threads.add("entered " + threading.current_thread().name)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self.threads.add(threading.current_thread().name)
        return tensor.clone()


def test_batches_come_pinned_in_order_from_a_thread_of_its_own() -> None:
    pinning, source = Cloning(), Slots(50)
    feed = PinningFeed(source, pinning)
    for step in range(50):
        token, batch = feed.next()
        assert (token, batch["x"].tolist()) == (step, source.values(step))
    assert feed.next() is None
    feed.close()
    assert pinning.threads == {"entered penstock-pin_0", "penstock-pin_0"}
    assert source.num_slots <= 4  # what was copied is free again


def test_held_batches_stay_as_they_are() -> None:
    device, source = FakeDevice(), Slots(120)
    feed = PinningFeed(source, device)
    held = [feed.next()[1]["x"] for _ in range(120)]
    feed.close()
    assert [tensor.tolist() for tensor in held] == [source.values(step) for step in range(120)]


def test_the_next_batch_is_pinned_while_the_user_has_one() -> None:
    pinned: list[int] = []

    class Noting(Cloning):
        def pin(self, tensor: torch.Tensor) -> torch.Tensor:
            pinned.append(int(tensor[0]))
            return tensor.clone()

    feed = PinningFeed(Slots(5, width=1), Noting())
    feed.next()
    wait_until(lambda: pinned == [0, 1])
    feed.close()


def test_only_what_is_ready_is_fetched_ahead() -> None:
    source = Slots(3, ready=lambda step: step != 1)
    feed = PinningFeed(source, Cloning())
    assert feed.next()[0] == 0
    assert source.num_asked == 1
    assert feed.next()[0] == 1
    assert source.num_asked == 3
    feed.close()


def test_an_error_of_pinning_comes_in_its_place_and_says_where_it_was() -> None:
    class Failing(Cloning):
        def pin(self, tensor: torch.Tensor) -> torch.Tensor:
            if int(tensor[0]) == 2:
                raise MemoryError("cannot lock so many pages")
            return tensor.clone()

    feed = PinningFeed(Slots(4, width=1), Failing())
    assert [feed.next()[0], feed.next()[0]] == [0, 1]
    with pytest.raises(MemoryError, match="so many pages") as caught:
        feed.next()
    assert caught.value.__notes__ == ["in the thread that pins batches"]
    assert feed.next()[0] == 3
    feed.close()


def test_a_ctrl_c_while_waiting_for_a_pin_loses_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    class Slow(Cloning):
        def pin(self, tensor: torch.Tensor) -> torch.Tensor:
            go_on.wait()
            return tensor.clone()

    def interrupted(*arguments: Any) -> None:
        monkeypatch.undo()
        go_on.set()
        raise KeyboardInterrupt

    feed = PinningFeed(Slots(4), Slow())
    monkeypatch.setattr("penstock.pytorch._feed.wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        feed.next()
    assert [feed.next()[0] for _ in range(4)] == [0, 1, 2, 3]
    feed.close()


def test_close_ends_the_thread_and_may_be_called_twice() -> None:
    feed = PinningFeed(Slots(50), Cloning())
    feed.next()
    assert pinning_threads()
    feed.close()
    feed.close()
    wait_until(nothing_runs)
    with pytest.raises(RuntimeError, match="This loop was closed"):
        feed.next()


class FailsLater(Slots):
    def make(self, step: int) -> Any:
        if step == 1:
            raise LookupError("never asked for")
        return super().make(step)


def test_a_feed_that_is_forgotten_takes_its_thread_along() -> None:
    feed = PinningFeed(Slots(50), Cloning())
    feed.next()
    assert pinning_threads()
    gc.disable()  # no cycle may be in the way
    try:
        del feed
        wait_until(nothing_runs)
    finally:
        gc.enable()


def test_a_feed_that_is_forgotten_with_an_error_ahead_is_collected() -> None:
    feed = PinningFeed(FailsLater(50), Cloning())
    feed.next()
    assert pinning_threads()
    del feed
    gc.collect()  # the traceback leads back to it
    wait_until(nothing_runs)


def test_close_does_not_wait_for_ever_for_a_pin_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.pytorch._feed._CLOSE_SECONDS", 0.01)
    go_on, has_begun = threading.Event(), threading.Event()

    class Hanging(Cloning):
        def pin(self, tensor: torch.Tensor) -> torch.Tensor:
            if int(tensor[0]) == 1:
                has_begun.set()
                go_on.wait()
            return tensor

    feed = PinningFeed(Slots(4, width=1), Hanging())
    feed.next()
    has_begun.wait()
    feed.close()
    assert pinning_threads()
    go_on.set()
    wait_until(nothing_runs)


def test_in_a_forked_child_it_refuses_and_can_be_closed() -> None:
    feed = PinningFeed(Slots(9), Cloning())
    feed.next()
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: there are threads
        pid = os.fork()
    if pid == 0:
        try:
            feed.next()
        except RuntimeError as error:
            os.write(writer, str(error).encode())
        feed.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert b"started before a fork" in os.read(reader, 1000)
    os.close(reader)
    os.close(writer)
    assert feed.next()[0] == 1
    feed.close()


EXITING = """
import sys
sys.path[:0] = {path!r}
from penstock.pytorch._feed import PinningFeed
from pytorch.fake_device import FakeDevice, Slots
feed = PinningFeed(Slots(9), FakeDevice())
feed.next()
{ending}
"""


@pytest.mark.parametrize(
    ("ending", "code"),
    [("1 / 0", 1), *(pytest.param(*case, marks=pytest.mark.stress) for case in (("", 0), ("raise SystemExit(3)", 3)))],
)
def test_the_interpreter_exits_with_a_feed_open(ending: str, code: int) -> None:
    script = EXITING.format(path=sys.path, ending=ending)
    done = subprocess.run([sys.executable, "-c", script], timeout=60, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert done.stdout == ""


def test_pin_memory_without_an_accelerator_warns_as_torch_does_and_does_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_warnings, "_said", set())
    if torch.accelerator.is_available():
        pytest.skip("there is one here")
    with pytest.warns(UserWarning, match="'pin_memory' argument is set as true but no accelerator is found") as ours:
        assert not wants_pinning(True)
    with pytest.warns(UserWarning, match="'pin_memory'") as theirs:
        next(iter(torch.utils.data.DataLoader([1], pin_memory=True)))
    assert str(ours[0].message) == str(theirs[0].message)
    assert ours[0].filename == __file__
    assert make_feed(Slots(1), device=None, pin_memory=False) is None
    assert nothing_runs()


def test_pin_memory_device_is_ignored_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_warnings, "_said", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wants_pinning(True, "cuda")
    assert "ignore pin_memory_device='cuda'" in str(caught[0].message)
    assert not wants_pinning(False, "cuda")

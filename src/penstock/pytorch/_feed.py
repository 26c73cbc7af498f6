"""Feeds: batches begun before they are asked for, and handed over in order: to pinned memory, and to a device.

    source (pipeline, torch batches) -> PinningFeed -> DeviceFeed -> training loop

A feed lies between what computes batches and the training loop: it begins a batch or two early and hands over the
oldest. All of it happens in the training thread, inside its `next()`, so a source needs no lock. It is asked ahead
only for what it says is ready: a slow source never delays a batch that is there.

**Pinning** is done by a background thread. Pinned memory comes from torch's own host allocator, which knows which
copies are still reading from it. The thread does nothing but copy into it: batches are fetched by the caller, and
fetched memory is free again once copied. It is the one thread of a `ThreadPoolExecutor`, which stops it when the feed
is closed or collected and lets it finish when the interpreter exits; it refers to neither feed nor source.

# NOTE [who waits for whom]
#   host batch -> pinned copy (thread) -> copy on the side stream -> mark -> current stream waits -> the user's kernels
#
# Early reads: the current stream waits for the mark behind the copy; the host does not.
# Late overwrites of the source: the pinned copy belongs to torch's host allocator, which reuses it when the copy has
#   read it. The memory that the host batch came in was free before that, when the pinned copy was made.
# Late overwrites of the batch: its memory belongs to the side stream. `record_stream` has it wait, once the user
#   lets go of it, for the kernels given to the current stream until then; without it the next copy may land in it.
# A host that runs ahead of the device would begin copies without end, each with memory of its own, so it waits until
#   all steps but the last two are over. These keep the device busy meanwhile.

The price: two batches of device memory where the host waits for each step and four where it does not, and one
more of pinned memory than that.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch

from penstock.pytorch._batches import can_keep, copy_batch, keepables, pin_batch
from penstock.pytorch._device import Accelerator, Event, HostPinning, Pinning, open_accelerator
from penstock.pytorch._warnings import warn_once

Begun = TypeVar("Begun")
OnDevice = Callable[[Any], Any]
"""What a user does to a batch on the device, on the stream of copies; returns the batch."""
_CLOSE_SECONDS = 5.0
_NUM_BEGUN = 2  # the one that is taken, and one that is pinned, or copied, during the step
_NUM_UNFINISHED_STEPS = 2


class BatchSource(Protocol):
    """Where batches come from, each with a receipt: what the loop needs to count it as handed over."""

    def next(self) -> tuple[Any, Any] | None:
        """(receipt, batch), or None when there are no more."""
        ...

    def is_ready(self) -> bool:
        """Whether `next` would return, or raise, without waiting."""
        ...


class Feed(BatchSource, Protocol):
    """A source that takes from another one, ahead of the training loop."""

    def close(self) -> None:
        """Let go of batches not handed over."""
        ...


def take(source: BatchSource, profiled_as: str) -> tuple[Any, Any] | None:
    """The next batch; while torch's profiler runs, as a range of this name. Entering one costs 20 us."""
    if not torch._C._autograd._profiler_enabled():
        return source.next()
    with torch.profiler.record_function(profiled_as):
        return source.next()


class CopyAhead(Generic[Begun]):
    """Keeps up to `num_begun` batches of a source begun; `begin` must not refer to the object that owns this one.

    An error of the source is kept until the batches before it were handed over, and raised once; after it the
    source is asked again.
    """

    def __init__(self, source: BatchSource, begin: Callable[[Any], Begun], *, num_begun: int) -> None:
        self._source = source
        self._begin = begin
        self._num_begun = num_begun
        self._begun: deque[tuple[Any, Begun]] = deque()
        self._error: Exception | None = None

    def first(self) -> tuple[Any, Begun] | None:
        """(receipt, begun) of the oldest batch, which stays until `drop_first`, so that a Ctrl-C loses none."""
        self._fill()
        if self._begun:
            return self._begun[0]
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback leads here
        return None

    def drop_first(self) -> None:
        """Forget the oldest batch: it was handed over."""
        self._begun.popleft()

    def is_ready(self) -> bool:
        """Whether `first` would not wait for the source."""
        return bool(self._begun) or self._error is not None or self._source.is_ready()

    def clear(self) -> Iterator[Begun]:
        """Forget everything, and yield what it was."""
        self._error = None
        while self._begun:
            yield self._begun.popleft()[1]

    def _fill(self) -> None:
        if self._error is not None:
            return
        try:
            while len(self._begun) < self._num_begun and (not self._begun or self._source.is_ready()):
                found = self._source.next()
                if found is None:
                    return
                self._begun.append((found[0], self._begin(found[1])))
                del found
        except Exception as error:  # noqa: BLE001 - raised when its turn comes
            self._error = error


class PinningFeed:
    """Hands over the batches of a source in pinned memory."""

    def __init__(self, source: BatchSource, pinning: Pinning) -> None:
        self._pid = os.getpid()
        executor = ThreadPoolExecutor(1, thread_name_prefix="penstock-pin", initializer=pinning.enter_thread)
        self._executor: ThreadPoolExecutor | None = executor
        self._ahead: CopyAhead[Future[Any]] = CopyAhead(
            source, lambda batch: executor.submit(_pin, pinning, batch), num_begun=_NUM_BEGUN
        )

    def next(self) -> tuple[Any, Any] | None:
        self._check()
        first = self._ahead.first()
        if first is None:
            return None
        receipt, future = first
        if not future.done():
            wait([future])
        self._ahead.drop_first()
        return receipt, future.result()

    def is_ready(self) -> bool:
        return self._ahead.is_ready()

    def close(self) -> None:
        """Stop the thread and let go of batches not handed over."""
        executor, self._executor = self._executor, None
        if executor is None or os.getpid() != self._pid:
            return
        executor.shutdown(wait=False, cancel_futures=True)
        wait([future for future in self._ahead.clear() if not future.cancelled()], timeout=_CLOSE_SECONDS)

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                "This loop was started before a fork; its thread belongs to the parent process. "
                "Start a new one in the child."
            )
        if self._executor is None:
            raise RuntimeError("This loop was closed. Start a new one.")


class _Copying(NamedTuple):
    """A batch on its way; without an event it is still on the host, and is copied when it is handed over."""

    batch: Any
    event: Event | None


class DeviceFeed:
    """Hands over the batches of a source on a device; the copy of the next one has begun by then.

    Use it from one thread at a time. Kernels that use a batch go to the stream that was current when it was
    handed over, or to one that waits for it, as with any tensor of torch's.
    """

    def __init__(self, source: BatchSource, accelerator: Accelerator, on_device: OnDevice | None = None) -> None:
        pinning = accelerator.pinning
        self._accelerator, self._on_device = accelerator, on_device
        self._pinned = None if pinning is None else PinningFeed(source, pinning)
        begin = partial(_begin_copy, accelerator, on_device)
        self._ahead: CopyAhead[_Copying] = CopyAhead(self._pinned or source, begin, num_begun=_NUM_BEGUN)
        self._steps: deque[Event] = deque()
        self._pid = os.getpid()
        self._is_closed = False

    def next(self) -> tuple[Any, Any] | None:
        self._check()
        self._wait_for_steps()
        first = self._ahead.first()
        if first is None:
            return None
        receipt, copying = first
        batch = self._arrive(copying)
        self._ahead.drop_first()
        return receipt, batch

    def is_ready(self) -> bool:
        return self._ahead.is_ready()

    def close(self) -> None:
        """Let go of batches not handed over; those that were stay as they are."""
        self._is_closed = True
        self._steps.clear()
        for _ in self._ahead.clear():
            pass
        if self._pinned is not None:
            self._pinned.close()

    def _wait_for_steps(self) -> None:
        self._steps.append(self._accelerator.mark())
        if len(self._steps) > _NUM_UNFINISHED_STEPS:
            self._steps.popleft().synchronize()

    def _arrive(self, copying: _Copying) -> Any:
        """See NOTE [who waits for whom]."""
        accelerator = self._accelerator
        if copying.event is None:
            moved = copy_batch(copying.batch, accelerator.copy)
            return moved if self._on_device is None else self._on_device(moved)
        accelerator.wait_for(copying.event)
        for value in keepables(copying.batch):
            accelerator.keep(value)
        return copying.batch

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError("This loop was started before a fork; a device cannot be used on both sides of it.")
        if self._is_closed:
            raise RuntimeError("This loop was closed. Start a new one.")


def make_feed(
    source: BatchSource, *, device: torch.device | None, pin_memory: bool, on_device: OnDevice | None = None
) -> Feed | None:
    """The feed between a source and the training loop; None if none is needed.

    `device` comes from `find_device`, `pin_memory` from `wants_pinning`. Copies to a device pin by themselves.
    """
    if device is not None:
        return DeviceFeed(source, open_accelerator(device), on_device)
    return PinningFeed(source, HostPinning(torch.accelerator.current_device_index())) if pin_memory else None


def _begin_copy(accelerator: Accelerator, on_device: OnDevice | None, batch: Any) -> _Copying:
    if not can_keep(batch):
        return _Copying(batch, None)
    with accelerator.side_stream():
        moved = copy_batch(batch, accelerator.copy)
        if on_device is not None:
            moved = on_device(moved)
            if not can_keep(moved):  # its memory could be reused under the user's kernels
                raise TypeError(
                    f"on_device={on_device!r} returned something with a `to` and no `record_stream`, whose memory "
                    "cannot be kept until your kernels are done. Return tensors, in dicts or lists."
                )
        return _Copying(moved, accelerator.mark())


def wants_pinning(pin_memory: bool, pin_memory_device: str = "") -> bool:
    """Whether torch's arguments ask for pinning; warns, in torch's words, of what has no effect."""
    if not pin_memory:
        return False
    if pin_memory_device:
        warn_once(
            "pin device",
            "pin_memory_device is deprecated, the current accelerator will be used as the device, "
            f"ignore pin_memory_device='{pin_memory_device}'.",
        )
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        reason = "no accelerator is found, then"
    elif accelerator.type == "mps":
        reason = "not supported on MPS now,"
    else:
        return True
    warn_once("pin", f"'pin_memory' argument is set as true but {reason} device pinned memory won't be used.")
    return False


def _pin(pinning: Pinning, batch: Any) -> Any:
    try:
        return pin_batch(batch, pinning.pin)
    except BaseException as error:
        error.add_note("in the thread that pins batches")
        raise

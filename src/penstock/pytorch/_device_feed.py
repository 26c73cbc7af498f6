"""From host batches to batches on the device, one ahead of the training loop.

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

from __future__ import annotations

import os
from collections import deque
from functools import partial
from typing import Any, NamedTuple

import torch

from penstock.pytorch._batches import can_keep, copy_batch, keepables
from penstock.pytorch._device import Accelerator, Event, open_accelerator
from penstock.pytorch._feed import BatchSource, Feed, HostPinning, Lookahead, PinningFeed

_NUM_BEGUN = 2  # the batch that is taken, and the one after it
_NUM_UNFINISHED_STEPS = 2


class _Copying(NamedTuple):
    """A batch on its way; without an event it is still on the host, and is copied when it is handed over."""

    batch: Any
    event: Event | None


class DeviceFeed:
    """Hands over the batches of a source on a device; the copy of the next one has begun by then.

    Use it from one thread at a time. Kernels that use a batch go to the stream that was current when it was
    handed over, or to one that waits for it, as with any tensor of torch's.
    """

    def __init__(self, source: BatchSource, accelerator: Accelerator) -> None:
        pinning = accelerator.pinning
        self._accelerator = accelerator
        self._pinned = None if pinning is None else PinningFeed(source, pinning)
        begin = partial(_begin_copy, accelerator)
        self._ahead: Lookahead[_Copying] = Lookahead(self._pinned or source, begin, num_begun=_NUM_BEGUN)
        self._steps: deque[Event] = deque()
        self._pid = os.getpid()
        self._is_closed = False

    def next(self) -> tuple[Any, Any] | None:
        """(receipt, batch on the device), or None when there are no more; raises what the source raised."""
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
        """Whether `next` would not wait for the source."""
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
            return copy_batch(copying.batch, accelerator.copy)
        accelerator.wait_for(copying.event)
        for value in keepables(copying.batch):
            accelerator.keep(value)
        return copying.batch

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError("This loop was started before a fork; a device cannot be used on both sides of it.")
        if self._is_closed:
            raise RuntimeError("This loop was closed. Start a new one.")


def make_feed(source: BatchSource, *, device: torch.device | None, pin_memory: bool) -> Feed | None:
    """The feed between a source and the training loop; None if none is needed.

    `device` comes from `find_device`, `pin_memory` from `wants_pinning`. Copies to a device pin by themselves.
    """
    if device is not None:
        return DeviceFeed(source, open_accelerator(device))
    return PinningFeed(source, HostPinning(torch.accelerator.current_device_index())) if pin_memory else None


def _begin_copy(accelerator: Accelerator, batch: Any) -> _Copying:
    if not can_keep(batch):
        return _Copying(batch, None)
    with accelerator.side_stream():
        moved = copy_batch(batch, accelerator.copy)
        return _Copying(moved, accelerator.mark())

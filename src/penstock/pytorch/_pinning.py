"""Pins batches in a background thread, ahead of the training loop.

Pinned memory comes from torch's own host allocator, which knows which copies are still reading from it. The thread
does nothing but copy into it: batches are fetched by the caller, and fetched memory is free again once copied.

It is the one thread of a `ThreadPoolExecutor`, which stops it when the feed is closed or collected and lets it
finish when the interpreter exits; the thread itself refers to neither feed nor source.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, Protocol

import torch

from penstock.pytorch._batches import pin_batch
from penstock.pytorch._feed import BatchSource, Lookahead
from penstock.pytorch._warnings import warn_once

_CLOSE_SECONDS = 5.0
_NUM_BEGUN = 2  # the one that is taken, and one that is pinned during the step


class Pinning(Protocol):
    """How memory is pinned."""

    def enter_thread(self) -> None:
        """Called once in the thread that pins."""
        ...

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of the tensor in pinned memory, or itself if it is there already."""
        ...


class HostPinning:
    """Torch's pinned memory for a device."""

    def __init__(self, device_index: int) -> None:
        self._device_index = device_index

    def enter_thread(self) -> None:
        """Leave the other cores to the trainer, and do not open the first device in addition to this one."""
        torch.set_num_threads(1)
        torch.accelerator.set_device_index(self._device_index)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy it into torch's pinned memory, unless it is on a device already."""
        return tensor.pin_memory() if tensor.device.type == "cpu" else tensor


class PinningFeed:
    """Hands over the batches of a source in pinned memory."""

    def __init__(self, source: BatchSource, pinning: Pinning) -> None:
        self._pid = os.getpid()
        self._executor: ThreadPoolExecutor | None = ThreadPoolExecutor(
            1, thread_name_prefix="penstock-pin", initializer=pinning.enter_thread
        )
        begin = partial(_submit, self._executor, pinning)
        self._ahead: Lookahead[Future[Any]] = Lookahead(source, begin, num_begun=_NUM_BEGUN)

    def next(self) -> tuple[Any, Any] | None:
        """(receipt, pinned batch), or None when there are no more; raises what source or pinning raised."""
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
        """Whether `next` would not wait for the source; for a copy in memory it may."""
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


def _submit(executor: ThreadPoolExecutor, pinning: Pinning, batch: Any) -> Future[Any]:
    return executor.submit(_pin, pinning, batch)


def _pin(pinning: Pinning, batch: Any) -> Any:
    try:
        return pin_batch(batch, pinning.pin)
    except BaseException as error:
        error.add_note("in the thread that pins batches")
        raise

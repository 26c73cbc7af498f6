"""What a feed asks of an accelerator, and how torch answers.

Written against `torch.accelerator`, so that CUDA, ROCm, XPU and whatever registers itself there are one case. MPS is
another: torch offers no second stream on it and pins no memory for it, so batches are copied in place and waited for.
"""

import contextlib
import functools
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from penstock.pytorch._batches import is_pinned

_WITHOUT_STREAMS = "mps"


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
        return tensor.pin_memory() if tensor.device.type == "cpu" else tensor


class Event(Protocol):
    """A mark in a stream."""

    def synchronize(self) -> None:
        """Wait, on the host, until the stream has reached the mark."""
        ...


class Accelerator(Protocol):
    """A device with streams. "Current" is the stream that the calling thread issues work on."""

    device: torch.device
    pinning: Pinning | None
    """How memory is pinned for it; None when copies are not from pinned memory."""

    def side_stream(self) -> AbstractContextManager[Any]:
        """Inside it, the current stream is one that only copies use."""
        ...

    def copy(self, value: Any) -> Any:
        """Begin to copy a tensor, or another object that has a `to`, to the device, on the current stream."""
        ...

    def mark(self) -> Event:
        """Mark what the current stream was given so far."""
        ...

    def wait_for(self, event: Any) -> None:
        """Have the current stream do nothing more before an event; the host does not wait."""
        ...

    def keep(self, batch: Any) -> None:
        """Have the memory of a tensor, once freed, wait for what the current stream was given until then."""
        ...


class StreamAccelerator:
    """One of torch's accelerators, with a stream of its own for copies."""

    def __init__(self, device: torch.device) -> None:
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        self.device = torch.device(device.type, index)
        self.pinning: Pinning | None = HostPinning(index)
        self._side = _side_stream(self.device)

    def side_stream(self) -> AbstractContextManager[Any]:
        """The stream that all loaders of this device copy on."""
        # A new object each time: a stream object keeps the stream to return to, and two threads would mix theirs up.
        side = self._side
        return torch.Stream(stream_id=side.stream_id, device_index=side.device_index, device_type=side.device_type)

    def copy(self, value: Any) -> Any:
        """Begin to copy; torch's host allocator knows about it, and does not reuse the pinned memory before it ends."""
        if is_pinned(value):
            with contextlib.suppress(TypeError):  # some have a `to` that takes only a device
                return value.to(self.device, non_blocking=True)
        return value.to(self.device)

    def mark(self) -> Event:
        """An event that the host waits for asleep."""
        event = torch.Event(self.device, blocking=True)
        torch.accelerator.current_stream(self.device).record_event(event)
        return event

    def wait_for(self, event: Any) -> None:
        torch.accelerator.current_stream(self.device).wait_event(event)

    def keep(self, batch: Any) -> None:
        """Tell torch's device allocator that the current stream uses a tensor of the side stream."""
        if not isinstance(batch, torch.Tensor) or batch.device == self.device:
            batch.record_stream(torch.accelerator.current_stream(self.device))


class _Done:
    def synchronize(self) -> None:
        """Nothing to wait for."""


class BlockingAccelerator:
    """An accelerator without streams: every copy is over when it returns."""

    pinning: Pinning | None = None

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def side_stream(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def copy(self, value: Any) -> Any:
        """Copy, and wait: the memory copied from is not pinned, and soon another batch's."""
        return value.to(self.device)

    def mark(self) -> Event:
        return _Done()

    def wait_for(self, event: Any) -> None:
        """Nothing to wait for."""

    def keep(self, batch: Any) -> None:
        """Nothing is reused early."""


def find_device(device: str | int | torch.device | None) -> torch.device | None:
    """The accelerator that a `device=` argument names; None for the CPU, where batches are handed over as they are.

    Raises:
        RuntimeError: it is not a device of torch's, or there is no such device here.
    """
    if device is None:
        return None
    found = torch.device(device)
    if found.type == "cpu":
        return None
    here = torch.accelerator.current_accelerator(check_available=True)
    if here is None or here.type != found.type:
        raise RuntimeError(
            f"device={str(found)!r} is not available: torch {torch.__version__} finds "
            f"{'no accelerator' if here is None else f'the accelerator {here.type!r}'} here. "
            "Use device='cpu', or install a build of torch and a driver for this device."
        )
    num_devices = torch.accelerator.device_count()
    if found.index is not None and found.index >= num_devices:
        raise RuntimeError(
            f"device={str(found)!r} is not available: torch finds {num_devices} {found.type!r} devices here."
        )
    return found


def open_accelerator(device: torch.device) -> StreamAccelerator | BlockingAccelerator:
    """The accelerator of a device; one without a number is the current one."""
    return BlockingAccelerator(device) if device.type == _WITHOUT_STREAMS else StreamAccelerator(device)


@functools.cache
def _side_stream(device: torch.device) -> torch.Stream:
    """One for all loaders: the memory that one epoch's batches leave behind is kept for this stream."""
    return torch.Stream(device)

"""A device on a simulated clock, which runs what it was given as late as a real one may.

Streams are queues of timed operations that take effect when the clock gets there: a copy first spoils its target and
reads its source at the very end, a kernel reads its arguments at its start and again at its end. Operations hold
addresses and no references, as a device does, and memory that was let go of is used again as torch's allocators do:
pinned memory when the copies from it are over, device memory at once for the stream that it belongs to, unless other
streams were recorded on it. So whatever is read early, or overwritten late, shows in the bytes and in `faults`.
"""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

SPOILED = 0xEE


@dataclass(eq=False)
class Stream:
    """Where the queue ends, in simulated seconds."""

    name: str
    end: float = 0.0


@dataclass(eq=False)
class Block:
    """Memory of the pinned or the device kind."""

    memory: np.ndarray
    stream: Stream | None = None
    recorded: set[Stream] = field(default_factory=set)
    written_at: float = 0.0
    """When the last copy into it is over."""
    free_at: float = 0.0
    """Once let go of: when it may be used again."""


class Event:
    def __init__(self, device: FakeDevice, time: float) -> None:
        self._device, self.time = device, time

    def synchronize(self) -> None:
        self._device.advance_to(self.time)


class FakeDevice:
    """An `Accelerator` and its `Pinning`, for which a copy takes `copy_seconds`."""

    device = torch.device("meta")

    def __init__(self, copy_seconds: float = 1.0) -> None:
        self.copy_seconds = copy_seconds
        self.now = 0.0
        self.compute, self.side = Stream("compute"), Stream("side")
        self.current = self.compute
        self.pinning = self
        self.faults: list[str] = []
        self.num_pinned_blocks = self.num_device_blocks = 0
        self._effects: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._free: list[Block] = []
        self._leased: dict[int, Block] = {}

    # What a feed calls

    def enter_thread(self) -> None:
        pass

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        pinned = self._tensor_like(tensor, None)
        return pinned.copy_(tensor)

    @contextlib.contextmanager
    def side_stream(self) -> Iterator[None]:
        before, self.current = self.current, self.side
        try:
            yield
        finally:
            self.current = before

    def copy(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value.to(self.device, non_blocking=True)
        target = self._tensor_like(value, self.current)
        begin, end = self._enqueue(self.copy_seconds)
        self._leased[target.data_ptr()].written_at = end
        if value.data_ptr() in self._leased:
            source_block = self._leased[value.data_ptr()]
            source_block.free_at = max(source_block.free_at, end)
        source, into, expected = _raw(value), _raw(target), _raw(value).copy()

        def finish() -> None:
            if not np.array_equal(source, expected):
                self.faults.append(f"{end}: the source of a copy was overwritten while it was read")
            into[...] = source

        self._at(begin, lambda: into.fill(SPOILED))
        self._at(end, finish)
        return target

    def mark(self) -> Event:
        return Event(self, max(self.now, self.current.end))

    def wait_for(self, event: Event) -> None:
        self.current.end = max(self.current.end, event.time)

    def keep(self, batch: torch.Tensor) -> None:
        self._leased[batch.data_ptr()].recorded.add(self.current)

    # What a training loop does

    def run_kernel(self, tensor: torch.Tensor, seconds: float) -> list[Any]:
        """Enqueue a kernel that reads a tensor; what it read is in the list when it is over."""
        begin, end = self._enqueue(seconds)
        if begin < self._leased[tensor.data_ptr()].written_at:
            self.faults.append(f"{begin}: a kernel reads what is not copied yet")
        raw, dtype, shape = _raw(tensor), tensor.numpy().dtype, tensor.shape
        seen: list[np.ndarray] = []
        read: list[Any] = []

        def finish() -> None:
            if not np.array_equal(raw, seen[0]):
                self.faults.append(f"{end}: memory was overwritten while a kernel read it")
            read.extend(seen[0].view(dtype).reshape(shape).tolist())

        self._at(begin, lambda: seen.append(raw.copy()))
        self._at(end, finish)
        return read

    def synchronize(self) -> None:
        self.advance_to(max(self.compute.end, self.side.end))

    def advance_to(self, time: float) -> None:
        """Let the host wait, and everything that is due by then happen."""
        self.now = max(self.now, time)
        while self._effects and self._effects[0][0] <= self.now:
            heapq.heappop(self._effects)[2]()

    # Memory

    @property
    def num_leased(self) -> int:
        """Tensors alive in pinned and in device memory."""
        return len(self._leased)

    def _tensor_like(self, tensor: torch.Tensor, stream: Stream | None) -> torch.Tensor:
        block = self._allocate(tensor.nbytes, stream)
        lease = (ctypes.c_char * tensor.nbytes).from_buffer(block.memory)
        weakref.finalize(lease, self._let_go, block, ctypes.addressof(lease)).atexit = False
        self._leased[ctypes.addressof(lease)] = block
        return torch.frombuffer(lease, dtype=tensor.dtype).reshape(tensor.shape)

    def _allocate(self, num_bytes: int, stream: Stream | None) -> Block:
        for block in self._free:
            if block.stream is stream and len(block.memory) == num_bytes and block.free_at <= self.now:
                self._free.remove(block)
                return block
        if stream is None:
            self.num_pinned_blocks += 1
        else:
            self.num_device_blocks += 1
        return Block(np.zeros(num_bytes, np.uint8), stream)

    def _let_go(self, block: Block, address: int) -> None:
        del self._leased[address]
        block.free_at = max([block.free_at, *(stream.end for stream in block.recorded)])
        block.recorded.clear()
        self._free.append(block)

    # Time

    def _enqueue(self, seconds: float) -> tuple[float, float]:
        begin = max(self.now, self.current.end)
        self.current.end = begin + seconds
        return begin, self.current.end

    def _at(self, time: float, effect: Callable[[], None]) -> None:
        heapq.heappush(self._effects, (time, next(self._numbers), effect))


def _raw(tensor: torch.Tensor) -> np.ndarray:
    """The bytes at a tensor's address, without keeping them alive."""
    assert tensor.is_contiguous()
    return np.ctypeslib.as_array((ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr()))


class Slots:
    """A source that hands over batches in memory that it reuses as soon as they are let go of, as the loader does."""

    def __init__(self, num_batches: int, *, width: int = 16, ready: Callable[[int], bool] = lambda step: True) -> None:
        self.num_batches, self.width, self.ready = num_batches, width, ready
        self.num_asked = 0
        self.num_slots = 0
        self._free: list[np.ndarray] = []

    def next(self) -> tuple[int, Any] | None:
        if self.num_asked >= self.num_batches:
            return None
        step, self.num_asked = self.num_asked, self.num_asked + 1
        return step, self.make(step)

    def is_ready(self) -> bool:
        return self.num_asked >= self.num_batches or self.ready(self.num_asked)

    def make(self, step: int) -> Any:
        if not self._free:
            self.num_slots += 1
            self._free.append(np.empty(self.width * 8, np.uint8))
        slot = self._free.pop()
        lease = (ctypes.c_char * len(slot)).from_buffer(slot)
        weakref.finalize(lease, self._take_back, slot).atexit = False
        return {"x": torch.frombuffer(lease, dtype=torch.int64).copy_(torch.tensor(self.values(step)))}

    def values(self, step: int) -> list[int]:
        return list(range(step * self.width, (step + 1) * self.width))

    def _take_back(self, slot: np.ndarray) -> None:
        slot.fill(SPOILED)
        self._free.append(slot)

"""Recycled memory that batches are written into and handed over in.

# NOTE [who frees a slot]
#   worker fills slot -> result -> lease -> arrays, tensors, slices of them -> last one dies -> slot is free
#
# A slot is anonymous shared memory (memfd): no name, nothing in /dev/shm, gone with the last process that
# has it. It is handed over as a lease, a fresh object that is the base of every array of the batch; when
# the last array or tensor on it dies, its finaliser puts the slot back. The finaliser hangs on the lease
# and never on an array: numpy lets a slice of a view refer past the view to its base, so the view can die
# while the slice lives. It may run in any thread at any moment, so all it does is append to a deque.

Allocating instead would cost a page fault for every 4 KiB of every batch.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import resource
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import SchemaError
from penstock.schema import Ragged, dtype_from_name, dtype_name

Batch = dict[str, Any]

_ALIGNMENT = 64
_FIRST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Placed:
    """An array in a slot."""

    offset: int
    shape: tuple[int, ...]
    dtype: str

    def view(self, memory: Any) -> NDArray[Any]:
        """The array, based on `memory`."""
        return np.ndarray(self.shape, dtype_from_name(self.dtype), memory, self.offset)


@dataclass(frozen=True, slots=True)
class PlacedRagged:
    """A ragged column in a slot."""

    values: Placed
    offsets: Placed
    is_bytes: bool

    def view(self, memory: Any) -> Ragged:
        """The column, based on `memory`."""
        return Ragged(self.values.view(memory), self.offsets.view(memory), self.is_bytes)


Layout = dict[str, Any]
"""What a batch is made of: `Placed` and `PlacedRagged` for what lies in the slot, the value itself for numbers."""


class Slot:
    """One stretch of anonymous shared memory, known to this process and one worker."""

    def __init__(self, number: int, descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor = os.memfd_create("penstock", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, _FIRST_BYTES)
        self.number = number
        self.descriptor = descriptor
        self._map: mmap.mmap | None = None
        weakref.finalize(self, os.close, descriptor).atexit = False

    @property
    def size(self) -> int:
        """Bytes it has now; a worker may have grown it."""
        return os.fstat(self.descriptor).st_size

    def memory(self, size: int) -> mmap.mmap:
        """The slot as memory of at least `size` bytes; growing keeps what is written."""
        if self._map is None or len(self._map) < size:
            now = self.size
            if now < size:
                now = max(size, now * 2)
                os.ftruncate(self.descriptor, now)
            self._map = mmap.mmap(self.descriptor, now)
        return self._map


class Arena:
    """Writes one batch into a slot; arrays asked of it are part of the batch without a copy."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._end = 0
        self._placed: dict[int, tuple[NDArray[Any], Placed]] = {}

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """A new array in the slot."""
        begin = -(-self._end // _ALIGNMENT) * _ALIGNMENT
        self._end = begin + math.prod(shape) * dtype.itemsize
        placed = Placed(begin, shape, dtype_name(dtype))
        array = placed.view(self._slot.memory(max(self._end, 1)))
        self._placed[id(array)] = array, placed
        return array

    def lay_out(self, batch: Mapping[str, Any]) -> Layout:
        """Where each value of a finished batch lies; what is not in the slot yet is copied there."""
        return {key: self._place(value) for key, value in batch.items()}

    def _place(self, value: Any) -> Any:
        if isinstance(value, Ragged):
            return PlacedRagged(self._place(value.values), self._place(value.offsets), value.is_bytes)
        if not isinstance(value, np.ndarray):
            return value
        if id(value) in self._placed:
            return self._placed[id(value)][1]
        try:
            copy = self.array(value.shape, value.dtype)
        except SchemaError:  # strings, objects, dates: nothing that a tensor could hold, so it travels as it is
            return value
        copy[...] = value
        return self._placed[id(copy)][1]


class SlotPool:
    """Slots that are free, and the count of those that are not."""

    def __init__(self) -> None:
        self._free: list[Slot] = []
        self._given_back: deque[Slot] = deque()
        self._released: deque[Slot] = deque()
        self._num_made = 0
        self._num_leased = 0
        self.num_slots = 0

    def take(self) -> Slot:
        """A free slot; as many are made as batches are held."""
        self._collect()
        if self._free:
            return self._free.pop()
        self.num_slots += 1
        self._num_made += 1
        return Slot(self._num_made)

    def give_back(self, slot: Slot) -> None:
        """Return a slot that was not handed over; any thread may."""
        self._given_back.append(slot)

    def hand_over(self, slot: Slot, layout: Layout) -> Batch:
        """The batch in a slot; the slot comes back when the last array on it dies."""
        if self.num_leased >= _max_leases():
            batch = {key: _copy(value) for key, value in _view(layout, slot.memory(slot.size)).items()}
            self.give_back(slot)
            return batch
        lease = (ctypes.c_char * slot.size).from_buffer(slot.memory(slot.size))
        self._num_leased += 1
        # See NOTE [who frees a slot].
        weakref.finalize(lease, self._released.append, slot).atexit = False
        return _view(layout, lease)

    def shrink(self) -> list[Slot]:
        """Let go of free slots beyond those being filled and two, and say which: their worker has them open too."""
        self._collect()
        num_wanted = self.num_held - self.num_leased + 2
        dropped = self._free[num_wanted:]
        del self._free[num_wanted:]
        self.num_slots -= len(dropped)
        return dropped

    @property
    def num_held(self) -> int:
        """Slots that hold a batch somebody still uses, or one that is being computed."""
        return self.num_slots - len(self._free) - len(self._given_back) - len(self._released)

    @property
    def num_leased(self) -> int:
        """Slots whose batch is in the user's hands."""
        return self._num_leased - len(self._released)

    def _collect(self) -> None:
        while self._given_back:
            self._free.append(self._given_back.popleft())
        while self._released:
            self._num_leased -= 1
            self._free.append(self._released.popleft())


def _view(layout: Layout, memory: Any) -> Batch:
    return {
        key: value.view(memory) if isinstance(value, (Placed, PlacedRagged)) else value for key, value in layout.items()
    }


def _copy(value: Any) -> Any:
    if isinstance(value, Ragged):
        return Ragged(value.values.copy(), value.offsets.copy(), value.is_bytes)
    return value.copy() if isinstance(value, np.ndarray) else value


def _max_leases() -> int:
    """Batches in the user's hands from which on they are handed over as copies: each slot costs two descriptors."""
    return max(8, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 32)

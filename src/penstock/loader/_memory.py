"""Recycled memory that batches are written to and handed over in.

# NOTE [who frees a slot]
#   worker fills slot -> result -> lease -> arrays, tensors, slices of them -> last one dies -> slot is free
#
# A slot is anonymous memory: no name, nothing in /dev/shm, gone with the last process that has it; shared
# with a worker process as a descriptor, or private to this one. It is handed over as a lease, a
# fresh object that is the base of every array of the batch; when the last array or tensor on it dies, its
# finaliser returns the slot. The finaliser is attached to the lease and never to an array: numpy makes a slice
# of a view refer to the base and not to the view, so the view can die while the slice lives. It may run in any
# thread at any moment, so all it does is append to a deque, and that in C: a Ctrl-C that arrived while Python
# code ran there would be swallowed, and the slot lost with it (observed).
#
# In threads and inline, users' functions see the slot's own arrays, and may keep one, or return a tensor on
# its memory. So a slot that such a function saw is not reused while anyone but the slot refers to its arrays.

Allocating instead would cost a page fault for every 4 KiB of every batch.
"""

import ctypes
import errno
import mmap
import os
import resource
import sys
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.errors import SchemaError
from penstock.loader._layout import (
    Batch,
    BatchLayout,
    Placed,
    PlacedArray,
    PlacedMany,
    PlacedRagged,
    place_after,
)
from penstock.schema import Ragged
from penstock.workers import create_shared_memory, grow_shared_memory

_FIRST_BYTES = 1 << 20
_HUGE_PAGE_BYTES = 2 << 20
_RESERVED_BYTES = 16 << 30  # address space, not memory
_MAP_NORESERVE = 0x4000  # Linux; Python names it from 3.13 on


class Arena(ABC):
    """Memory that batches are written to, one after the other; arrays taken from it reach the user without a copy."""

    def __init__(self) -> None:
        self._end = 0
        self._placed: dict[int, tuple[NDArray[Any], PlacedArray]] = {}
        self._offered: BatchLayout | None = None
        self._arrays: dict[str, NDArray[Any]] = {}
        self._is_offered = False
        self.is_seen = False
        """Whether users' functions get to see its arrays."""

    @abstractmethod
    def memory(self, size: int) -> mmap.mmap:
        """The memory, at least `size` bytes of it; growing keeps its contents."""

    def begin(self) -> None:
        """Start a new batch, over the last one."""
        self._end = 0
        self._placed.clear()
        self._is_offered = False

    def arrays(self, layout: BatchLayout) -> dict[str, NDArray[Any]]:
        """All arrays of a layout, at the start of the slot: the same as last time if the layout is."""
        if layout is not self._offered:
            self._arrays = layout.view(self.memory(layout.end))
            self._offered = layout
        self._end, self._is_offered = layout.end, True
        return self._arrays

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """A new array in the slot."""
        placed = place_after(self._end, shape, dtype)
        self._end = placed.end
        array = placed.view(self.memory(max(self._end, 1)))
        self._placed[id(array)] = array, placed
        return array

    def is_kept(self) -> bool:
        """Whether a user's function kept an array that it was given; see NOTE [who frees a slot]."""
        return _most_references(self._arrays) > _OWN_REFERENCES

    def lay_out(self, batch: Mapping[str, Any]) -> BatchLayout:
        """Where each value of a finished batch lies; arrays that are not in the slot yet are copied there."""
        if self._is_offered:
            assert self._offered is not None
            layout, arrays = self._offered, self._arrays
            if batch.keys() == arrays.keys() and all(batch[key] is array for key, array in arrays.items()):
                return layout
            self._placed.update({id(array): (array, layout[key]) for key, array in arrays.items()})
        parts = {key: self._place(value) for key, value in batch.items()}
        self._placed.clear()
        return BatchLayout(parts)

    def _place(self, value: Any) -> Any:
        if isinstance(value, Ragged):
            return PlacedRagged(self._place(value.values), self._place(value.offsets), value.is_bytes)
        if type(value) is list or type(value) is dict:
            keys, inside = (list(value), list(value.values())) if isinstance(value, dict) else (None, value)
            parts = [self._place(inner) for inner in inside]
            return PlacedMany(keys, parts) if any(isinstance(part, Placed) for part in parts) else value
        if not isinstance(value, np.ndarray):
            return value
        if id(value) in self._placed:
            return self._placed[id(value)][1]
        try:
            copy = self.array(value.shape, value.dtype)
        except SchemaError:  # strings, objects, dates: nothing that a tensor could hold, so it is sent as it is
            return value
        copy[...] = value
        return self._placed[id(copy)][1]


def _most_references(arrays: Mapping[str, NDArray[Any]]) -> int:
    return max((sys.getrefcount(array) for array in arrays.values()), default=0)


_OWN_REFERENCES = _most_references({"nobody else's": np.empty(0)})


class Slot(Arena):
    """A piece of anonymous shared memory, known to this process and one worker."""

    def __init__(self, number: int, descriptor: int | None = None) -> None:
        super().__init__()
        if descriptor is None:
            descriptor = create_shared_memory("penstock", _FIRST_BYTES)
        self.number = number
        self.descriptor = descriptor
        self._map: mmap.mmap | None = None
        weakref.finalize(self, os.close, descriptor).atexit = False

    @property
    def size(self) -> int:
        """Its size now; a worker may have grown it."""
        return os.fstat(self.descriptor).st_size

    def memory(self, size: int) -> mmap.mmap:
        """The slot, mapped; another process may have grown it."""
        if self._map is None or len(self._map) < size:
            now = self.size
            if now < size:
                now = max(size, now * 2)
                grow_shared_memory(self.descriptor, now)
            self._map = mmap.mmap(self.descriptor, now)
        return self._map


class PrivateSlot(Arena):
    """A piece of this process's own memory, for threads: in huge pages, which are a quarter faster to write to.

    It is reserved once, far larger than any batch, and takes memory only where it is written to: arrays
    never move, and there is nothing to keep track of. Batches smaller than a huge page use small ones: otherwise 600
    of 64 bytes, held by the user, took 1.2 GB.
    """

    number = 0

    def __init__(self) -> None:
        super().__init__()
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._map = mmap.mmap(-1, _RESERVED_BYTES, flags=flags)
        self._is_huge = False

    def memory(self, size: int) -> mmap.mmap:
        """The slot, all of it."""
        if size >= _HUGE_PAGE_BYTES and not self._is_huge:
            self._map.madvise(mmap.MADV_HUGEPAGE)
            self._is_huge = True
        if size > _RESERVED_BYTES:
            raise MemoryError(f"A batch of {size:,} bytes was requested; {_RESERVED_BYTES:,} is the limit.")
        return self._map


AnySlot = Slot | PrivateSlot
SomeSlot = TypeVar("SomeSlot", bound=AnySlot)


def private_slot(number: int) -> AnySlot:
    """A slot for threads; if that much address space cannot be reserved, one of the other kind."""
    try:
        return PrivateSlot()
    except OSError:
        return Slot(number)


class SlotPool(Generic[SomeSlot]):
    """Slots that are free, and the count of those that are not."""

    def __init__(self, make_slot: Callable[[int], SomeSlot]) -> None:
        self._make_slot = make_slot
        self._free: list[SomeSlot] = []
        self._given_back: deque[SomeSlot] = deque()
        self._released: deque[weakref.ref[Any]] = deque()
        self._leased: dict[int, tuple[weakref.ref[Any], SomeSlot]] = {}
        self._num_made = 0
        self.num_slots = 0
        self.share_files(1)

    def share_files(self, num_pools: int) -> None:
        """Leave other pools their share of the open files: a slot costs two.

        Once the user holds that many batches, further ones are handed over as copies.
        """
        self._max_leases = max(1, max(8, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 16) // num_pools)

    def take(self) -> SomeSlot:
        """A free slot; a new one is made if all are in use."""
        if self._given_back or self._released:
            self._collect()
        while self._free:
            slot = self._free.pop()
            if not (slot.is_seen and slot.is_kept()):
                return slot
            self.num_slots -= 1  # its memory is left to whoever holds it
        try:
            slot = self._make_slot(self._num_made + 1)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                error.add_note("Prefetched batches, and those you hold, take two open files each: raise `ulimit -n`.")
            raise
        self._num_made += 1
        self.num_slots += 1
        return slot

    def give_back(self, slot: SomeSlot) -> None:
        """Return a slot that was not handed over, from any thread."""
        self._given_back.append(slot)

    def hand_over(self, slot: SomeSlot, layout: BatchLayout) -> list[Batch]:
        """The batches in a slot; the slot comes back when the last array on it dies."""
        memory = slot.memory(layout.end)
        if len(self._leased) - len(self._released) >= self._max_leases:
            copies = [{key: _copy(value) for key, value in batch.items()} for batch in layout.pieces(memory)]
            self.give_back(slot)
            return copies
        lease = (ctypes.c_char * len(memory)).from_buffer(memory)
        reference = weakref.ref(lease, self._released.append)  # see NOTE [who frees a slot]
        self._leased[id(reference)] = (reference, slot)
        return layout.pieces(lease)

    def shrink(self) -> list[SomeSlot]:
        """Drop free slots beyond those being filled plus two; return them, because their worker has them open too."""
        if self._given_back or self._released:
            self._collect()
        if len(self._free) <= 2:
            return []
        num_wanted = self.num_held - self.num_leased + 2
        dropped = self._free[num_wanted:]
        del self._free[num_wanted:]
        self.num_slots -= len(dropped)
        return dropped

    @property
    def num_held(self) -> int:
        """Slots whose batch is still in use, or being computed."""
        return self.num_slots - len(self._free) - len(self._given_back) - len(self._released)

    @property
    def num_leased(self) -> int:
        """Slots whose batch is in the user's hands."""
        return len(self._leased) - len(self._released)

    def _collect(self) -> None:
        while self._given_back:
            self._free.append(self._given_back.popleft())
        while self._released:
            _, slot = self._leased.pop(id(self._released.popleft()), (None, None))
            if slot is None:  # a Ctrl-C interrupted its hand-over; it is lost
                self.num_slots -= 1
            else:
                self._free.append(slot)


def _copy(value: Any) -> Any:
    if isinstance(value, Ragged):
        return Ragged(_copy(value.values), value.offsets.copy(), value.is_bytes)
    if type(value) is list:
        return [_copy(inner) for inner in value]
    if type(value) is dict:
        return {key: _copy(inner) for key, inner in value.items()}
    return value.copy() if isinstance(value, np.ndarray) else value

"""A program on its way to worker processes: pickled once, in memory that all of them map.

Large arrays and tensors lie beside the pickle. Each worker maps the memory privately: nothing is copied until a worker
writes to it, and its writes stay its own. Descriptors that the program needs are sent with the message.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import pickle
import weakref
from multiprocessing import context, resource_tracker
from typing import Any

from penstock.workers._by_reference import Departing, Inherited, ProgramPickler
from penstock.workers._channel import MAX_DESCRIPTORS, Channel
from penstock.workers._forks import abandon_in_forks
from penstock.workers._packed import Packed
from penstock.workers._shared_memory import create_shared_memory

_ALIGNMENT = 64
_LARGE_BYTES = 1 << 16
_LOCKS = b"multiprocessing.synchronize"
_TRACKED = b"multiprocessing.shared_memory"

_Message = tuple[dict[str, Any] | None, list[tuple[int, int]], bool]
"""(how to import the user's script, where the pickle and its buffers lie, whether the tracker's descriptor is last)"""


class Parcel:
    """A program, ready to be sent to any number of workers.

    Raises:
        TypeError: it cannot be pickled, or contains a function from an interactive session.
    """

    def __init__(self, program: Any, *, otherwise: str) -> None:
        departing = Departing()
        self._buffers: list[pickle.PickleBuffer] = []
        packed = Packed.pack(program, otherwise=otherwise, dump=lambda value: self._dump(value, departing))
        self.has_locks = _LOCKS in packed.data
        """Whether a worker may hold a lock that others wait for."""
        is_tracked = _TRACKED in packed.data
        if is_tracked:  # else a worker using a named segment would start its own tracker, which removes the segment
            tracker = resource_tracker.getfd()
            assert tracker is not None
            departing.duplicate_for_child(tracker)
        memory, spans = _write([packed.data, *(buffer.raw() for buffer in self._buffers)])
        self._buffers.clear()
        self._message: _Message = (packed.script, spans, is_tracked)
        self._descriptors = (memory, *departing.descriptors.values())
        self.close = weakref.finalize(self, _close, self._descriptors)
        """Let go of the memory; idempotent. No worker can be started after it."""
        self.close.atexit = False
        abandon_in_forks(self)

    def send(self, channel: Channel) -> None:
        """Send it; if the worker is already dead, its channel will report the end of file."""
        with contextlib.suppress(ConnectionError):
            rest = self._descriptors
            while len(rest) > MAX_DESCRIPTORS:
                channel.send(None, rest[:MAX_DESCRIPTORS])
                rest = rest[MAX_DESCRIPTORS:]
            channel.send(self._message, rest)

    def abandon(self) -> None:
        """In a forked child, which starts no workers of this parcel."""
        self.close()

    def _dump(self, value: Any, departing: Departing) -> bytes:
        file = io.BytesIO()
        context.set_spawning_popen(departing)  # type: ignore[arg-type] # it has the methods that are called
        try:
            ProgramPickler(file, self._keep).dump(value)
        finally:
            context.set_spawning_popen(None)
        return file.getvalue()

    def _keep(self, buffer: pickle.PickleBuffer) -> bool:
        """Set a buffer aside; a small one stays in the pickle."""
        if buffer.raw().nbytes < _LARGE_BYTES:
            return True
        self._buffers.append(buffer)
        return False


def receive_program(channel: Channel) -> Any:
    """In a worker: the program, from its owner's first message."""
    message, descriptors = channel.receive()
    while message is None:
        message, more = channel.receive()
        descriptors += more
    try:
        return _load(message, descriptors)
    finally:
        _close(descriptors)


def _load(message: _Message, descriptors: tuple[int, ...]) -> Any:
    script, spans, is_tracked = message
    memory = memoryview(mmap.mmap(descriptors[0], 0, access=mmap.ACCESS_COPY))
    data, *buffers = (memory[begin:end] for begin, end in spans)
    if is_tracked:
        resource_tracker._resource_tracker._fd = os.dup(descriptors[-1])  # type: ignore[attr-defined]
    Inherited.arrived = descriptors[1:]
    return Packed(data, script).load(buffers)


def _write(parts: list[Any]) -> tuple[int, list[tuple[int, int]]]:
    """(descriptor of anonymous memory that holds all parts, where each of them lies in it)."""
    memory = create_shared_memory("penstock-program", sum(len(part) + _ALIGNMENT for part in parts))
    spans, end = [], 0
    with open(memory, "wb", closefd=False) as file:
        for part in parts:
            begin = -(-end // _ALIGNMENT) * _ALIGNMENT
            file.seek(begin)
            file.write(part)
            end = begin + len(part)
            spans.append((begin, end))
    return memory, spans


def _close(descriptors: tuple[int, ...]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)

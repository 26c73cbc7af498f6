"""A program on its way to worker processes: pickled once, in memory that all of them map.

Large arrays and tensors lie beside the pickle. Each worker maps the memory privately: nothing is copied until a worker
writes to it, and its writes stay its own. Descriptors that the program needs are sent with the message. The user's
script is imported only if the program contains a function from it.

Some things are sent by reference, not as a copy:

- A memory-mapped array is sent as the name of its file, and mapped again. If that would give different numbers, because
  the file is gone or a private map was written to, it is copied instead, with a warning.
- Whatever shares memory or a lock with the owner (`multiprocessing.Value`, `Queue`, `Event`, a tensor in shared memory)
  is sent the way `multiprocessing` and torch send it to their own processes: as descriptors and names.
"""

from __future__ import annotations

import contextlib
import functools
import io
import mmap
import os
import pickle
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import context, resource_tracker
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from penstock.workers._channel import MAX_DESCRIPTORS, Channel, abandon_in_forks, create_shared_memory
from penstock.workers._script import SCRIPT_NAMES, find_script, import_script

_ALIGNMENT = 64
_LARGE_BYTES = 1 << 16
_LOCKS = b"multiprocessing.synchronize"
_TRACKED = b"multiprocessing.shared_memory"
_Message = tuple[dict[str, Any] | None, list[tuple[int, int]], bool]
"""(how to import the user's script, where the pickle and its buffers lie, whether the tracker's descriptor is last)"""
_MAP_MODES = {"r": "r", "c": "c", "r+": "r+", "w+": "r+"}


@dataclass(frozen=True, slots=True)
class Pickled:
    """A pickled value. The user's script is imported only if the value contains a function from it."""

    data: bytes | memoryview
    script: dict[str, Any] | None
    """How to import it, as `multiprocessing.spawn.prepare` expects it; `package` names a package with a `__main__`."""

    @classmethod
    def pack(cls, value: Any, *, otherwise: str, dump: Callable[[Any], bytes] = pickle.dumps) -> Pickled:
        """Pickle a value; `otherwise` ends the advice in an error: the alternative to using a module.

        Raises:
            TypeError: it cannot be pickled, or contains a function from an interactive session.
        """
        try:
            data = dump(value)
        except Exception as error:
            raise TypeError(
                f"What worker processes are to do cannot be sent to them: {error}. "
                f"Put functions and classes at the top of a module, or {otherwise}"
            ) from error
        return cls(data, find_script(otherwise) if any(name in data for name in SCRIPT_NAMES) else None)

    def load(self, buffers: Sequence[memoryview] = ()) -> Any:
        """The value, in the process it was sent to, given the buffers that `dump` set aside."""
        if self.script is not None:
            import_script(self.script)
        return pickle.loads(self.data, buffers=buffers)  # noqa: S301 - sent by the owner of this process


def needs_torch(functions: Iterable[Callable[..., Any]]) -> bool:
    """Whether a worker that is sent these functions imports torch, as far as this process can see.

    It imports their modules, or the user's script, with all modules and packages that these take names from.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    modules, packages = [_module_of(function) for function in functions], set()
    for name in modules:  # which grows
        package = name.partition(".")[0]
        for other in _modules_named_in(name):
            if other.partition(".")[0] != package:
                packages.add(other.partition(".")[0])
            elif other not in modules:
                modules.append(other)
    packages.discard("penstock")  # which imports torch only for who asks
    return any(
        module is torch or getattr(module, "__dict__", {}).get("torch") is torch
        for name, module in list(sys.modules.items())
        if name in modules or name.partition(".")[0] in packages
    )


def _module_of(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__module__", None) or type(function).__module__


def _modules_named_in(name: str) -> Iterator[str]:
    """The modules that a module takes names from, and the package that it is in."""
    if "." in name:
        yield name.rpartition(".")[0]
    for value in list(getattr(sys.modules.get(name), "__dict__", {}).values()):
        owner = value if isinstance(value, type | types.FunctionType) else type(value)
        found: object = value.__name__ if isinstance(value, types.ModuleType) else owner.__module__
        if isinstance(found, str):
            yield found


class SentProgram:
    """A program, ready to be sent to any number of workers.

    Raises:
        TypeError: it cannot be pickled, or contains a function from an interactive session.
    """

    def __init__(self, program: Any, *, otherwise: str) -> None:
        departing = Departing()
        self._buffers: list[pickle.PickleBuffer] = []
        pickled = Pickled.pack(program, otherwise=otherwise, dump=lambda value: self._dump(value, departing))
        self.has_locks = _LOCKS in pickled.data
        """Whether a worker may hold a lock that others wait for."""
        is_tracked = _TRACKED in pickled.data
        if is_tracked:  # else a worker using a named segment would start its own tracker, which removes the segment
            tracker = resource_tracker.getfd()
            assert tracker is not None
            departing.duplicate_for_child(tracker)
        memory, spans = _write([pickled.data, *(buffer.raw() for buffer in self._buffers)])
        self._buffers.clear()
        self._message: _Message = (pickled.script, spans, is_tracked)
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
        """In a forked child, which starts no workers with it."""
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
    return Pickled(data, script).load(buffers)


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


class ProgramPickler(ForkingPickler):
    """Pickles a program; `buffer_callback` is offered every array and tensor in it."""

    def __init__(self, file: Any, buffer_callback: Callable[[pickle.PickleBuffer], Any]) -> None:
        super().__init__(file, 5, True, buffer_callback)

    def reducer_override(self, value: Any) -> Any:
        """Send maps as maps, and the memory of tensors as a buffer; leave the rest to `multiprocessing` and torch."""
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        if numpy is not None and isinstance(value, numpy.ndarray):
            root = _map_of(value)
            return NotImplemented if root is None else _reduce_map(value, root)
        if torch is not None and type(value) is getattr(torch, "UntypedStorage", None):
            is_private = value.device.type == "cpu" and not value.is_shared() and value.nbytes()
            if is_private:
                return _make_storage, (pickle.PickleBuffer(torch.empty(0, dtype=torch.uint8).set_(value).numpy()),)
        return NotImplemented


class Inherited:
    """A descriptor sent along with a program, by its number; `multiprocessing` calls `detach`."""

    arrived: tuple[int, ...] = ()
    """The descriptors of the program that this process is loading."""

    def __init__(self, number: int) -> None:
        self._number = number

    def detach(self) -> int:
        """The descriptor in this process; the caller closes it."""
        return os.dup(self.arrived[self._number])


class Departing:
    """Collects the descriptors of a program; `multiprocessing` takes it for the process being started."""

    def __init__(self) -> None:
        self.descriptors: dict[int, int] = {}
        """Copies, by the descriptor they were made from."""

    def duplicate_for_child(self, descriptor: int) -> int:
        """Send a descriptor along, and return its number."""
        if descriptor not in self.descriptors:
            self.descriptors[descriptor] = os.dup(descriptor)
        return list(self.descriptors).index(descriptor)

    def DupFd(self, number: int) -> Inherited:  # noqa: N802 - multiprocessing's name
        """What is pickled instead of a descriptor."""
        return Inherited(number)


def _make_storage(memory: Any) -> Any:
    import torch

    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


def _map_of(array: Any) -> Any:
    """The memory map that an array is, or is a view of; None for others."""
    numpy = sys.modules["numpy"]
    while isinstance(array.base, numpy.ndarray):
        array = array.base
    return array if isinstance(array, numpy.memmap) and array.filename is not None else None


def _reduce_map(array: Any, root: Any) -> Any:
    obstacle = _obstacle(root)
    if obstacle is not None:
        warnings.warn(
            f"{root.filename}: {obstacle}, so worker processes are sent a copy of the mapped array: "
            f"{array.nbytes:,} bytes.",
            stacklevel=2,
        )
        return NotImplemented
    first = array.ctypes.data - root.ctypes.data
    where = (str(root.filename), _MAP_MODES[root.mode], root.offset, root.nbytes)
    is_map = isinstance(array, type(root))
    return _map_again, (where, array.dtype, array.shape, array.strides, first, is_map)


def _map_again(
    where: tuple[str, str, int, int],
    dtype: Any,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    first: int,
    is_map: bool,
) -> Any:
    import numpy

    path, mode, offset, num_bytes = where
    array = numpy.memmap(path, numpy.uint8, mode, offset, (num_bytes,))  # type: ignore[call-overload]
    view = numpy.ndarray(shape, dtype, array, first, strides)
    return view.view(numpy.memmap) if is_map else view


def _obstacle(root: Any) -> str | None:
    """Why mapping the file again would give different numbers, if it would."""
    try:
        region, anonymous = _region(root.ctypes.data)
        num_bytes = os.stat(root.filename).st_size
    except OSError:
        return "the file is gone"
    if region.endswith("(deleted)") or num_bytes < root.offset + root.nbytes:
        return "the file is not the one that was mapped"
    return "the private map was written to" if anonymous else None


def _region(address: int) -> tuple[str, int]:
    """(what is mapped at an address, how many kilobytes of it are private to this process)."""
    region, is_found = "", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        begin, separator, _ = line.partition(" ")[0].partition("-")
        if separator:
            if is_found:
                break
            end = line.partition("-")[2].partition(" ")[0]
            region, is_found = line, int(begin, 16) <= address < int(end, 16)
        elif is_found and line.startswith("Anonymous:"):
            return region, int(line.split()[1])
    return region if is_found else "(deleted)", 0

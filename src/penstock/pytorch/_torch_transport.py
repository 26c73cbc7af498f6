"""Any value from a worker to the trainer: tensors and arrays in the shared slot, the rest in one small pickle.

    value -> pack -> (content, arrays in the slot) -> TorchAnswer.as_batch => engine
    engine => read_answer -> (TorchAnswer, views of the leased slot) -> unpack -> value

Pickle's own out-of-band buffers do the walking: whatever the containers are, named tuples, data classes,
a user's own batch class, each tensor or array inside is one buffer. Tensors that were stacked in the slot
stay where they are; all others are copied there once, span by span (NOTE [spans]). In the trainer the same
pickle is read with buffers that are views of the leased slot: nothing is copied.

Strides are kept, and views of the same memory stay views of the same memory. What is made of several tensors
(sparse, nested) or of a storage (quantised, a subclass) is pickled as torch does it, around the tensors or the
storage inside.

# NOTE [spans]
#   Which bytes tensors lie in, so that they can be copied elsewhere and be the same views of the same memory there.
#
#   Tensors whose memory overlaps, such as columns of one table, are in one span: what is written to one shows in the
#   others, as after torch's own hand-over. Torch sends whole storages; a span has only what its tensors reach, so a row
#   of a large tensor is not sent with all of it. Where most of a span would be gaps, its tensors are copied one by one,
#   without the gaps: their strides change, and they no longer overlap.
"""

from __future__ import annotations

import ctypes
import io
import math
import pickle
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch._utils import ExceptionWrapper
from torch.multiprocessing.reductions import rebuild_typed_storage

from penstock.loader import Arena, Batch

_ALIGNMENT = 64
_MAX_PARTS = 32
_BYTE = np.dtype(np.uint8)
_NUMPY_DTYPES = {
    getattr(torch, name): np.dtype(name)
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
}

_MAX_WASTE = 2
"""A span may be this many times as large as its tensors together."""

_Extent = tuple[int, int, int]
"""(address of the first byte, address behind the last, number of the tensor)"""

Place = tuple[int, int, torch.dtype, tuple[int, ...], tuple[int, ...]]
"""A tensor: (number of its span, or -1 if it is empty; first element in the span, dtype, shape, strides)"""

Array = NDArray[Any]


class PlainTensors(NamedTuple):
    """A tensor, or a list or dict of nothing but plain tensors: most batches are one of these."""

    keys: list[Any] | int | None
    """Of a dict its keys, of a list its length, of a single tensor None. The arrays come in the same order."""


class PickledValue(NamedTuple):
    """Anything else."""

    pickled: bytes
    spans: list[int | tuple[int, int]]
    """Where each span of memory lies: in the array of this number, or in these bytes of the last one."""
    buffers: list[int | Place]
    """What each out-of-band buffer is: a span, by its number, or a tensor in one."""


class WorkerFailure(NamedTuple):
    """What was raised instead, wrapped as torch wraps it."""

    error: ExceptionWrapper


class WorkerEnd(NamedTuple):
    """The worker's share of an iterable dataset is used up."""


Content = PlainTensors | PickledValue
"""A batch, but for its arrays."""


class FirstBatches(NamedTuple):
    """What a worker of an iterable dataset began with, to be compared with the others."""

    digests: tuple[int, ...]
    has_asked: bool
    """Whether anything in the worker asked which worker it is."""


class TorchAnswer(NamedTuple):
    """What a worker answers to a `TorchItem`. The arrays of the content lie in the slot beside it."""

    content: Content | WorkerFailure | WorkerEnd
    state: bytes | None = None
    """Where an iterable dataset stands after this batch."""
    first_batches: FirstBatches | None = None
    """Comes once, with the second batch."""
    has_ended: bool = False
    """Whether the iterable dataset ended within this batch."""

    def as_batch(self, arrays: Sequence[Array] = ()) -> Batch:
        """What an engine carries: this answer first, then the arrays in order.

        The answer travels as plain tuples: pickling its classes takes about 10 us more per batch.
        """
        kind = _KINDS.index(type(self.content))
        batch: Batch = {"answer": (kind, tuple(self.content), self.state, self.first_batches, self.has_ended)}
        for number, array in enumerate(arrays):
            batch[str(number)] = array
        return batch


_KINDS: tuple[type[Any], ...] = (PlainTensors, PickledValue, WorkerFailure, WorkerEnd)


def read_answer(batch: Batch) -> tuple[TorchAnswer, list[Array]]:
    """The answer and the arrays that `as_batch` was given, as the engine brought them."""
    (kind, content, *rest), *arrays = batch.values()
    return TorchAnswer(_KINDS[kind](*content), *rest), arrays


class SlotTensors:
    """New tensors in a slot, for one batch."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.arrays: list[Array] = []
        self._numbers: dict[int, int] = {}

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor to be written; it is valid until the worker's next batch."""
        known = _NUMPY_DTYPES.get(dtype)
        if known is not None:
            array = self._arena.array(shape, known)
            tensor = torch.from_numpy(array)
        else:
            array = self._arena.array((math.prod(shape) * dtype.itemsize,), _BYTE)
            tensor = torch.from_numpy(array).view(dtype).view(shape)
        self._numbers[array.ctypes.data] = len(self.arrays)
        self.arrays.append(array)
        return tensor

    def place(self, tensor: torch.Tensor) -> int:
        """The number of the array that a plain tensor is, or now is copied to."""
        number = self.number_at(ByteSpan(tensor.data_ptr(), tensor.nbytes)) if tensor.is_contiguous() else None
        if number is not None:
            array = self.arrays[number]
            if (array.shape, array.dtype) == (tensor.shape, _NUMPY_DTYPES[tensor.dtype]):
                return number
        self.empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)
        return len(self.arrays) - 1

    def number_at(self, span: ByteSpan) -> int | None:
        """Which of the arrays has these bytes, and no others."""
        number = self._numbers.get(span.address)
        return None if number is None or span.num_bytes != self.arrays[number].nbytes else number


def pack(value: Any, tensors: SlotTensors, arena: Arena) -> tuple[Content, list[Array]]:
    """(the value without its arrays, the arrays in the slot)."""
    flat = _flatten(value)
    if flat is not None:
        content, parts = flat
        return content, [tensors.arrays[tensors.place(part)] for part in parts]
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    held = pickler.held
    spans = TensorSpans([one for one in held if isinstance(one, torch.Tensor)])
    in_spans = iter(spans.places)
    buffers = [next(in_spans) if isinstance(one, torch.Tensor) else spans.add_bytes(one.raw()) for one in held]
    places, rest = _place_spans(spans.spans, tensors, arena)
    return PickledValue(file.getvalue(), places, buffers), [*tensors.arrays, rest]


def unpack(content: Content, arrays: list[Array]) -> Any:
    """The value that was packed; its tensors lie in the slot."""
    if isinstance(content, PlainTensors):
        tensors = [torch.from_numpy(array) for array in arrays]
        if content.keys is None:
            return tensors[0]
        return tensors if isinstance(content.keys, int) else dict(zip(content.keys, tensors, strict=True))
    rest = arrays[-1]
    spans = [arrays[place] if isinstance(place, int) else rest[place[0] : place[1]] for place in content.spans]
    storages = [torch.from_numpy(span).untyped_storage() for span in spans]
    buffers = [spans[one] if isinstance(one, int) else rebuild_tensor(one, storages) for one in content.buffers]
    return pickle.loads(content.pickled, buffers=buffers)  # noqa: S301 - from a worker of this process


def _flatten(value: Any) -> tuple[PlainTensors, list[torch.Tensor]] | None:
    """The parts of a value that is `PlainTensors`, else None. It saves a seventh of what a small batch costs."""
    keys: int | list[Any] | None = None
    if type(value) is torch.Tensor:
        parts = [value]
    elif type(value) is list:
        keys, parts = len(value), value
    elif type(value) is dict:
        keys, parts = list(value), list(value.values())
    else:
        return None
    if len(parts) > _MAX_PARTS:
        return None
    for part in parts:
        if type(part) is not torch.Tensor or part.dtype not in _NUMPY_DTYPES or part.requires_grad:
            return None
        if not _is_memory(part) or not part.is_contiguous():  # in this order: a sparse tensor cannot be asked
            return None
    if len({part.untyped_storage().data_ptr() for part in parts}) < len(parts):  # they may be views of each other
        return None
    return PlainTensors(keys), parts


class _Pickler(pickle.Pickler):
    """Sets aside tensors, storages and arrays, in `held`; a tensor's place among the buffers is taken by a mark."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5, buffer_callback=self._keep)
        self.held: list[torch.Tensor | pickle.PickleBuffer] = []
        self._next: torch.Tensor | None = None

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            return self._reduce_tensor(value, kind) if _is_memory(value) else NotImplemented
        if isinstance(value, np.ndarray) and not value.flags.writeable:
            return value.copy().__reduce_ex__(5)  # as of an image; what arrives is the user's to write to
        if kind is torch.TypedStorage or kind is torch.UntypedStorage:  # of a subclass, or quantised
            untyped = getattr(value, "_untyped_storage", value)
            if untyped.device.type == "cpu":
                self._next = torch.empty(0, dtype=torch.uint8).set_(untyped)
                return _rebuild_storage, (_MARK, getattr(value, "dtype", torch.uint8))  # what torch rebuilds from
        return NotImplemented

    def _reduce_tensor(self, tensor: torch.Tensor, kind: type[torch.Tensor]) -> Any:
        self._next = tensor.detach().resolve_conj().resolve_neg()
        if kind is torch.nn.Parameter:
            return torch.nn.Parameter, (_MARK, tensor.requires_grad)
        return (_with_gradient if tensor.requires_grad else _as_it_is), (_MARK,)

    def _keep(self, buffer: pickle.PickleBuffer) -> None:
        self.held.append(buffer if self._next is None else self._next)
        self._next = None


_MARK = pickle.PickleBuffer(bytearray(1))
"""When the pickle is read, the buffer that it stands for is the tensor itself."""


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _with_gradient(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.requires_grad_()


def _rebuild_storage(memory: torch.Tensor, dtype: torch.dtype) -> Any:
    return rebuild_typed_storage(memory.untyped_storage(), dtype)  # type: ignore[no-untyped-call]


def _is_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but strided memory of this process."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.__dict__
    )


def _place_spans(
    spans: list[ByteSpan], tensors: SlotTensors, arena: Arena
) -> tuple[list[int | tuple[int, int]], Array]:
    """(where each span lies: the number of an array, or bytes of the second value; that array)."""
    places: list[int | tuple[int, int]] = []
    end = 0
    for span in spans:
        number = tensors.number_at(span)
        if number is None:
            begin = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = begin + span.num_bytes
        places.append((begin, end) if number is None else number)
    rest = arena.array((end,), _BYTE)
    address = rest.ctypes.data
    for span, place in zip(spans, places, strict=True):
        if isinstance(place, tuple):
            ctypes.memmove(address + place[0], span.address, span.num_bytes)
    return places, rest


class ByteSpan(NamedTuple):
    """Bytes to be copied."""

    address: int
    num_bytes: int


class TensorSpans:
    """The spans of some tensors, and where in them each tensor is. Keeps the memory alive."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._arrays: list[NDArray[Any]] = []
        self.spans: list[ByteSpan] = []
        self.places: list[Place] = [(-1, 0, one.dtype, tuple(one.shape), one.stride()) for one in tensors]
        extents = sorted(_extent(tensor, number) for number, tensor in enumerate(tensors) if tensor.numel())
        for group in _overlapping(extents):
            if not self._add_whole(group):
                for _, _, number in group:
                    self._add_compact(number)

    def add_bytes(self, raw: memoryview) -> int:
        """Add a span that no tensor is in, and return its number."""
        array = np.frombuffer(raw, np.uint8)
        self._arrays.append(array)
        self.spans.append(ByteSpan(array.ctypes.data, array.nbytes))
        return len(self.spans) - 1

    def _add_whole(self, group: Sequence[_Extent]) -> bool:
        """Add a span that keeps strides and overlaps; False when it would be mostly gaps."""
        begin, end = group[0][0], max(end for _, end, _ in group)
        tensors = [self._tensors[number] for _, _, number in group]
        if end - begin > _MAX_WASTE * sum(tensor.nbytes for tensor in tensors):
            return False
        if any((extent[0] - begin) % tensor.itemsize for extent, tensor in zip(group, tensors, strict=True)):
            return False
        for (first, _, number), tensor in zip(group, tensors, strict=True):
            self._place(number, (first - begin) // tensor.itemsize, tensor)
        self.spans.append(ByteSpan(begin, end - begin))
        return True

    def _add_compact(self, number: int) -> None:
        tensor = self._tensors[number] = self._tensors[number].clone(memory_format=torch.contiguous_format)
        self._place(number, 0, tensor)
        self.spans.append(ByteSpan(tensor.data_ptr(), tensor.nbytes))

    def _place(self, number: int, first: int, tensor: torch.Tensor) -> None:
        self.places[number] = (len(self.spans), first, tensor.dtype, tuple(tensor.shape), tensor.stride())


def rebuild_tensor(place: Place, storages: Sequence[torch.UntypedStorage]) -> torch.Tensor:
    """A tensor at its place, given the storage of each span."""
    span, first, dtype, shape, strides = place
    if span < 0:
        return torch.empty_strided(shape, strides, dtype=dtype)
    return torch.empty(0, dtype=dtype).set_(storages[span], first, shape, strides)


def _extent(tensor: torch.Tensor, number: int) -> _Extent:
    begin = tensor.data_ptr()
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (1 + reach) * tensor.itemsize, number


def _overlapping(extents: Sequence[_Extent]) -> Iterator[list[_Extent]]:
    """Groups of sorted extents; no byte is in two groups."""
    group: list[_Extent] = []
    end = 0
    for extent in extents:
        if group and extent[0] >= end:
            yield group
            group = []
        group.append(extent)
        end = max(end, extent[1])
    if group:
        yield group

"""Any value from a worker to the trainer: tensors and arrays in the shared slot, the rest in one small pickle.

    value -> pack -> (content, arrays in the slot) -> TorchAnswer.as_batch => engine
    engine => read_answer -> (TorchAnswer, views of the leased slot) -> unpack -> value

Pickle's own out-of-band buffers do the walking: whatever the containers are, named tuples, data classes,
a user's own batch class, each tensor or array inside is one buffer. Tensors that were stacked in the slot
stay where they are; all others are copied there once, one after the other. In the trainer the same
pickle is read with buffers that are views of the leased slot: nothing is copied.

Strides are kept where the tensor is dense, so channels-last stays channels-last. Two tensors on one storage arrive as
two. What is not plain memory (sparse, quantised, with gradients, a subclass, on a device) is pickled by value.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch._utils import ExceptionWrapper

from penstock.loader import Arena, Batch

_ALIGNMENT = 64
_MAX_PARTS = 32
_BYTE = np.dtype(np.uint8)
_NUMPY_DTYPES = {
    getattr(torch, name): np.dtype(name)
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
}

Array = NDArray[Any]


class PlainTensors(NamedTuple):
    """A tensor, or a list or dict of nothing but plain tensors: most batches are one of these."""

    keys: list[Any] | int | None
    """Of a dict its keys, of a list its length, of a single tensor None. The arrays come in the same order."""


class PickledValue(NamedTuple):
    """Anything else."""

    pickled: bytes
    buffers: list[int | tuple[int, int]]
    """Where each out-of-band buffer lies: in the array of this number, or in these bytes of the last one."""


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

    def as_batch(self, arrays: Sequence[Array] = ()) -> Batch:
        """What an engine carries: this answer first, then the arrays in order.

        The answer travels as plain tuples: pickling its classes takes about 10 us more per batch.
        """
        kind = _KINDS.index(type(self.content))
        batch: Batch = {"answer": (kind, tuple(self.content), self.state, self.first_batches)}
        for number, array in enumerate(arrays):
            batch[str(number)] = array
        return batch


_KINDS: tuple[type[Any], ...] = (PlainTensors, PickledValue, WorkerFailure, WorkerEnd)


def read_answer(batch: Batch) -> tuple[TorchAnswer, list[Array]]:
    """The answer and the arrays that `as_batch` was given, as the engine brought them."""
    (kind, content, state, first_batches), *arrays = batch.values()
    return TorchAnswer(_KINDS[kind](*content), state, first_batches), arrays


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
        number = self.number_of(tensor)
        if number is None or (self.arrays[number].shape, self.arrays[number].dtype) != (
            tensor.shape,
            _NUMPY_DTYPES[tensor.dtype],
        ):
            self.empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)
            number = len(self.arrays) - 1
        return number

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """Which of the arrays a tensor covers from end to end."""
        number = self._numbers.get(tensor.data_ptr())
        if number is None or not tensor.is_contiguous() or tensor.nbytes != self.arrays[number].nbytes:
            return None
        return number


def pack(value: Any, tensors: SlotTensors, arena: Arena) -> tuple[Content, list[Array]]:
    """(the value without its arrays, the arrays in the slot)."""
    flat = _flatten(value)
    if flat is not None:
        content, parts = flat
        return content, [tensors.arrays[tensors.place(part)] for part in parts]
    file = io.BytesIO()
    pickler = _Pickler(file, tensors)
    pickler.dump(value)
    buffers, rest = _place_rest(pickler.buffers, pickler.numbers, arena)
    return PickledValue(file.getvalue(), buffers), [*tensors.arrays, rest]


def unpack(content: Content, arrays: list[Array]) -> Any:
    """The value that was packed; its tensors lie in the slot."""
    if isinstance(content, PlainTensors):
        tensors = [torch.from_numpy(array) for array in arrays]
        if content.keys is None:
            return tensors[0]
        return tensors if isinstance(content.keys, int) else dict(zip(content.keys, tensors, strict=True))
    rest = arrays[-1]
    buffers = [arrays[place] if isinstance(place, int) else rest[place[0] : place[1]] for place in content.buffers]
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
    if len(parts) > _MAX_PARTS or len({id(part) for part in parts}) < len(parts):
        return None
    for part in parts:
        if type(part) is not torch.Tensor or part.dtype not in _NUMPY_DTYPES:
            return None
        if not _is_plain(part) or not part.is_contiguous():  # in this order: a sparse tensor cannot be asked
            return None
    return PlainTensors(keys), parts


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, tensors: SlotTensors) -> None:
        super().__init__(file, protocol=5, buffer_callback=self._keep)
        self._tensors = tensors
        self.buffers: list[pickle.PickleBuffer] = []
        self.numbers: dict[int, int] = {}
        """Which array of the slot a buffer is, by the buffer's place in the list."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, np.ndarray) and not value.flags.writeable:  # as of an image; what arrives is the user's
            return value.copy().__reduce_ex__(5)
        if type(value) is not torch.Tensor or not _is_plain(value):
            return NotImplemented
        number = self._tensors.number_of(value)
        if number is not None:
            self.numbers[len(self.buffers)] = number
            buffer = _buffer(self._tensors.arrays[number])
            return _rebuild, (buffer, value.dtype, tuple(value.shape), None)
        dense, strides = _dense(value)
        return _rebuild, (_buffer(dense), value.dtype, tuple(value.shape), strides)

    def _keep(self, buffer: pickle.PickleBuffer) -> None:
        self.buffers.append(buffer)


def _buffer(array: Array) -> pickle.PickleBuffer:
    return pickle.PickleBuffer(array)  # type: ignore[arg-type] # a Buffer from Python 3.12 on


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.__dict__
    )


def _dense(tensor: torch.Tensor) -> tuple[Array, tuple[int, ...] | None]:
    """(the tensor's bytes in the order of its memory, its strides if that is not row by row)."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    strides = None
    if not tensor.is_contiguous():
        tensor = tensor.clone()  # keeps strides where they leave no gap, else goes row by row
        strides = None if tensor.is_contiguous() else tensor.stride()
    flat = tensor.as_strided((tensor.numel(),), (1,)) if strides else tensor.reshape(-1)
    return flat.view(torch.uint8).numpy(), strides


def _place_rest(
    buffers: list[pickle.PickleBuffer], numbers: dict[int, int], arena: Arena
) -> tuple[list[int | tuple[int, int]], Array]:
    """(where each buffer lies: the number of an array, or a span of the second value; that array)."""
    places: list[int | tuple[int, int]] = []
    spans: list[tuple[int, memoryview]] = []
    end = 0
    for index, buffer in enumerate(buffers):
        if index in numbers:
            places.append(numbers[index])
            continue
        raw = buffer.raw()
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = begin + raw.nbytes
        places.append((begin, end))
        spans.append((begin, raw))
    rest = arena.array((end,), _BYTE)
    for begin, raw in spans:
        rest[begin : begin + raw.nbytes] = np.frombuffer(raw, _BYTE)
    return places, rest


def _rebuild(
    buffer: Array, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...] | None
) -> torch.Tensor:
    tensor = torch.from_numpy(buffer)
    if tensor.dtype is dtype and tensor.shape == shape:
        return tensor
    tensor = tensor.view(dtype)
    return tensor.view(shape) if strides is None else tensor.as_strided(shape, strides)

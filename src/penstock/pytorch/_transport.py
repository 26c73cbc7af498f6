"""Any value from a worker to the trainer: tensors and arrays in the shared slot, the rest in one small pickle.

Pickle's own out-of-band buffers do the walking: whatever the containers are, named tuples, data classes,
a user's own batch class, each tensor or array inside is one buffer. Tensors that were stacked in the slot
already stay where they are; all others are copied there once, behind each other. Over there the same
pickle is read with the buffers being views of the leased slot: nothing is copied.

Strides are kept where the tensor is dense, so channels-last stays so. Two tensors on one storage arrive as
two. What is not plain memory (sparse, quantised, with gradients, a subclass, on a device) is pickled by value.
"""

from __future__ import annotations

import io
import math
import pickle
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.loader import Arena, Batch

_ALIGNMENT = 64
_MAX_PARTS = 32
_BYTE = np.dtype(np.uint8)
_NUMPY_DTYPES = {
    getattr(torch, name): np.dtype(name)
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
}


class SlotTensors:
    """New tensors in a slot, for one batch."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.arrays: list[NDArray[Any]] = []
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


def pack(value: Any, tensors: SlotTensors, arena: Arena) -> Batch:
    """The value as what an engine carries."""
    flat = _flatten(value)
    if flat is not None:
        form, parts = flat
        numbers = [tensors.place(part) for part in parts]
        return {"form": form} | {str(place): tensors.arrays[number] for place, number in enumerate(numbers)}
    file = io.BytesIO()
    pickler = _Pickler(file, tensors)
    pickler.dump(value)
    places, rest = _place_rest(pickler.buffers, pickler.numbers, arena)
    batch: Batch = {"pickle": file.getvalue(), "places": places, "rest": rest}
    for number, array in enumerate(tensors.arrays):
        batch[str(number)] = array
    return batch


def unpack(batch: Batch) -> Any:
    """The value that was packed; its tensors lie in the slot."""
    if "form" in batch:
        form = batch["form"]
        if form is None:
            return torch.from_numpy(batch["0"])
        if type(form) is int:
            return [torch.from_numpy(batch[str(place)]) for place in range(form)]
        return {key: torch.from_numpy(batch[str(place)]) for place, key in enumerate(form)}
    rest = batch["rest"]
    buffers = [batch[str(place)] if type(place) is int else rest[place[0] : place[1]] for place in batch["places"]]
    return pickle.loads(batch["pickle"], buffers=buffers)  # noqa: S301 - from a worker of this process


def _flatten(value: Any) -> tuple[int | list[Any] | None, list[torch.Tensor]] | None:
    """(form, tensors) of a tensor, a list or a dict of nothing but plain tensors: most batches are one of these.

    Their forms are None, a number and the keys. It saves a seventh of what a small batch costs.
    """
    form: int | list[Any] | None = None
    if type(value) is torch.Tensor:
        parts = [value]
    elif type(value) is list:
        form, parts = len(value), value
    elif type(value) is dict:
        form, parts = list(value), list(value.values())
    else:
        return None
    if len(parts) > _MAX_PARTS or len({id(part) for part in parts}) < len(parts):
        return None
    for part in parts:
        if type(part) is not torch.Tensor or part.dtype not in _NUMPY_DTYPES:
            return None
        if not _is_plain(part) or not part.is_contiguous():  # in this order: a sparse one cannot be asked
            return None
    return form, parts


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


def _buffer(array: NDArray[Any]) -> pickle.PickleBuffer:
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


def _dense(tensor: torch.Tensor) -> tuple[NDArray[Any], tuple[int, ...] | None]:
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
) -> tuple[list[int | tuple[int, int]], NDArray[Any]]:
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
    buffer: NDArray[Any], dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...] | None
) -> torch.Tensor:
    tensor = torch.from_numpy(buffer)
    if tensor.dtype is dtype and tensor.shape == shape:
        return tensor
    tensor = tensor.view(dtype)
    return tensor.view(shape) if strides is None else tensor.as_strided(shape, strides)

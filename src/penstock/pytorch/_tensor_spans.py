"""Which bytes tensors lie in, so that they can be copied elsewhere and be the same views of the same memory there.

Tensors whose memory overlaps, such as columns of one table, are in one span: what is written to one shows in the
others, as after torch's own hand-over. Torch sends whole storages; a span has only what its tensors reach, so a row
of a large tensor is not sent with all of it. Where most of a span would be gaps, its tensors are copied one by one,
without the gaps: their strides change, and they no longer overlap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

_MAX_WASTE = 2
"""A span may be this many times as large as its tensors together."""

_Extent = tuple[int, int, int]
"""(address of the first byte, address behind the last, number of the tensor)"""

Place = tuple[int, int, torch.dtype, tuple[int, ...], tuple[int, ...]]
"""A tensor: (number of its span, or -1 if it is empty; first element in the span, dtype, shape, strides)"""


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


def storage_of(array: NDArray[Any]) -> torch.UntypedStorage:
    """The memory of an array."""
    return torch.from_numpy(array).untyped_storage()


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

"""The tensors of a batch, whatever it is made of: made from arrays, pinned, copied to a device, or found.

A plan's batches are dicts of arrays, which become tensors of the same memory. Other batches are the user's own
structures. Containers are rebuilt as torch's `pin_memory` rebuilds them: the type of the user's dict, list, tuple or
namedtuple is kept where it can be copied. Dataclasses are rebuilt as well, `Ragged` among them. An
object that has a method of its own (`pin_memory`, `to`) is asked to do the work itself, and everything else
is left alone.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import from_numpy

from penstock.schema import Ragged

# numpy knows these only through ml_dtypes, and torch does not know ml_dtypes: the bytes go over as integers.
_BY_NAME = {
    "bfloat16": (np.uint16, torch.bfloat16),
    "float8_e4m3fn": (np.uint8, torch.float8_e4m3fn),
    "float8_e5m2": (np.uint8, torch.float8_e5m2),
    "float8_e4m3fnuz": (np.uint8, torch.float8_e4m3fnuz),
    "float8_e5m2fnuz": (np.uint8, torch.float8_e5m2fnuz),
}
if hasattr(torch, "float8_e8m0fnu"):  # from 2.7 on
    _BY_NAME["float8_e8m0fnu"] = (np.uint8, torch.float8_e8m0fnu)


def as_tensors(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch with tensors in place of arrays; nothing is copied.

    A ragged column becomes a `Ragged` of tensors, byte strings a list of `bytes`, several of them a list
    of lists, in lists and dicts too; numbers stay as they are, and so do arrays of what no tensor holds.
    """
    tensors: dict[str, Any] = {}
    for key, value in batch.items():
        try:
            tensors[key] = from_numpy(value)
        except TypeError:
            tensors[key] = value if type(value) is int else _convert(value)
    return tensors


def pin_batch(batch: Any, pin: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The batch with its tensors pinned."""
    if isinstance(batch, torch.Tensor):
        return pin(batch)
    return batch.pin_memory() if hasattr(batch, "pin_memory") else _rebuild(batch, lambda value: pin_batch(value, pin))


def copy_batch(batch: Any, copy: Callable[[Any], Any]) -> Any:
    """The batch with whatever has a `to`, tensors first of all, copied."""
    return copy(batch) if hasattr(batch, "to") else _rebuild(batch, lambda value: copy_batch(value, copy))


def is_pinned(value: Any) -> bool:
    """Whether `pin_batch` could pin the tensors of something that has a `to`."""
    return hasattr(value, "pin_memory") or _inside(value) is not None


def can_keep(batch: Any) -> bool:
    """Whether `keepables` finds every tensor that the batch has on the device."""
    if isinstance(batch, torch.Tensor):
        return batch.layout is torch.strided
    if hasattr(batch, "record_stream"):
        return True
    inside = _inside(batch)
    if inside is None:
        return not hasattr(batch, "to")
    return all(can_keep(value) for value in inside)


def keepables(batch: Any) -> Iterator[Any]:
    """Everything in the batch that has a `record_stream`: tensors, and objects that pass it on to theirs."""
    if hasattr(batch, "record_stream"):
        yield batch
    else:
        for value in _inside(batch) or ():
            yield from keepables(value)


def _inside(value: Any) -> Sequence[Any] | None:
    """What a container holds; None for anything else."""
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return value
    if _is_dataclass(value):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return None


def _rebuild(value: Any, change: Callable[[Any], Any]) -> Any:
    """A container like this one with what it holds changed; anything else as it is."""
    if isinstance(value, (str, bytes)):
        return value
    if isinstance(value, Mapping):
        return _rebuild_mapping(value, {key: change(inner) for key, inner in value.items()})
    if isinstance(value, tuple):
        inner = [change(inner) for inner in value]
        return type(value)(*inner) if hasattr(value, "_fields") else type(value)(inner)
    if isinstance(value, Sequence):
        return _rebuild_sequence(value, [change(inner) for inner in value])
    if _is_dataclass(value):
        return _rebuild_dataclass(value, change)
    return value


def _rebuild_mapping(old: Mapping[Any, Any], new: dict[Any, Any]) -> Any:
    try:
        if isinstance(old, MutableMapping):  # copied and not constructed: it may carry more than its items
            clone: Any = copy.copy(old)
            clone.update(new)
            return clone
        return type(old)(new)  # type: ignore[call-arg]
    except TypeError:
        return new


def _rebuild_sequence(old: Sequence[Any], new: list[Any]) -> Any:
    try:
        if isinstance(old, MutableSequence):
            clone: Any = copy.copy(old)
            for index, value in enumerate(new):
                clone[index] = value
            return clone
        return type(old)(new)  # type: ignore[call-arg]
    except TypeError:
        return new


def _rebuild_dataclass(value: Any, change: Callable[[Any], Any]) -> Any:
    """Without its `__init__`, which may do more than assign, and even if it is frozen."""
    clone = copy.copy(value)
    for field in dataclasses.fields(value):
        object.__setattr__(clone, field.name, change(getattr(value, field.name)))
    return clone


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _convert(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _tensor(value)
    if isinstance(value, Ragged):
        if value.is_bytes or value.is_nested:
            return list(value)
        return Ragged(_tensor(value.values), _tensor(value.offsets))  # type: ignore[arg-type]
    if type(value) is dict:
        return as_tensors(value)
    return [_convert(inner) for inner in value] if type(value) is list else value


def _tensor(array: NDArray[Any]) -> torch.Tensor | NDArray[Any]:
    try:
        return from_numpy(array)
    except TypeError:
        known = _BY_NAME.get(array.dtype.name)
        return array if known is None else from_numpy(array.view(known[0])).view(known[1])

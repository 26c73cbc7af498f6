"""Samples of uneven length, side by side in one array."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Sample `i` is `values[offsets[i]:offsets[i + 1]]`; byte strings come out as `bytes`.

    Values and offsets are arrays, or tensors in batches of a DataLoader.

    >>> ragged = Ragged(np.array([5, 6, 7]), np.array([0, 2, 2, 3]))
    >>> [sample.tolist() for sample in ragged]
    [[5, 6], [], [7]]
    """

    values: NDArray[Any]
    offsets: NDArray[np.int64]
    is_bytes: bool = False

    @classmethod
    def from_lengths(cls, values: NDArray[Any], lengths: NDArray[Any] | Sequence[int], is_bytes: bool = False) -> Self:
        """Samples of these lengths, one after the other in `values`."""
        return cls(values, offsets_of(lengths), is_bytes)

    @classmethod
    def concatenate(cls, parts: Sequence[Ragged]) -> Self:
        """The samples of all parts; there must be at least one part."""
        values = [part.values[part.offsets[0] : part.offsets[-1]] for part in parts]
        lengths = [part.lengths for part in parts]
        return cls.from_lengths(np.concatenate(values), np.concatenate(lengths), parts[0].is_bytes)

    def take(self, indices: NDArray[np.int64]) -> Ragged:
        """Copies of the samples at `indices`, none negative; this very object if that is all of them, in order.

        >>> [sample.tolist() for sample in Ragged(np.array([5, 6, 7]), np.array([0, 2, 2, 3])).take(np.array([2, 0]))]
        [[7], [5, 6]]
        """
        lengths = self.lengths
        if (indices[1:] > indices[:-1]).all():  # a mask takes an eighth of the memory of a list of places
            if len(indices) == len(self):
                return self
            is_taken = np.zeros(len(self), bool)
            is_taken[indices] = True
            values = self.values[self.offsets[0] : self.offsets[-1]][np.repeat(is_taken, lengths)]
            return Ragged.from_lengths(values, lengths[indices], self.is_bytes)
        offsets = offsets_of(lengths[indices])
        places = np.repeat(self.offsets[indices] - offsets[:-1], lengths[indices]) + np.arange(offsets[-1])
        return Ragged(self.values[places], offsets, self.is_bytes)

    def padded(self, value: float = 0, *, multiple: int = 1, side: Literal["right", "left"] = "right") -> NDArray[Any]:
        """One array, or tensor, as wide as the longest sample, with `value` as padding.

        Args:
            value: What to pad with.
            multiple: Round the width up to a multiple of this.
            side: Which side to pad.

        >>> Ragged(np.array([5, 6, 7]), np.array([0, 2, 2, 3])).padded(-1).tolist()
        [[5, 6], [-1, -1], [7, -1]]
        """
        if self.is_bytes:
            raise TypeError("Byte strings cannot be padded; `list(ragged)` gives them as `bytes`.")
        is_value = self.mask(multiple=multiple, side=side)
        values: Any = self.values[self.offsets[0] : self.offsets[-1]]
        shape = (*is_value.shape, *values.shape[1:])
        padded: NDArray[Any]
        padded = values.new_full(shape, value) if self._is_of_tensors else np.full(shape, value, values.dtype)
        _writable(padded)[is_value] = _writable(values)
        return padded

    def mask(self, *, multiple: int = 1, side: Literal["right", "left"] = "right") -> NDArray[np.bool_]:
        """Where `padded` has the samples' own values.

        >>> Ragged(np.array([5, 6, 7]), np.array([0, 2, 2, 3])).mask(side="left").tolist()
        [[True, True], [False, False], [False, True]]
        """
        if multiple < 1 or side not in ("right", "left"):
            raise ValueError(
                f"multiple={multiple!r}, side={side!r}: multiple must be at least 1, side 'right' or 'left'."
            )
        lengths: Any = self.lengths
        width = -(-(int(lengths.max()) if len(self) else 0) // multiple) * multiple
        places = lengths.new_ones(width).cumsum(0) - 1 if self._is_of_tensors else np.arange(width)
        left = width - lengths[:, None] if side == "left" else 0 * lengths[:, None]
        is_value: NDArray[np.bool_] = (places >= left) & (places < left + lengths[:, None])
        return is_value

    def nested(self) -> Any:
        """A nested tensor in jagged layout that shares this memory; for a `Ragged` of tensors.

        Raises:
            TypeError: the values are arrays, or byte strings.
        """
        if self.is_bytes or not self._is_of_tensors:
            raise TypeError("nested() needs a Ragged of tensors, as a DataLoader delivers; this one holds arrays.")
        return sys.modules["torch"].nested.nested_tensor_from_jagged(self.values, self.offsets)

    @property
    def _is_of_tensors(self) -> bool:
        return not isinstance(self.values, np.ndarray)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Length of each sample."""
        lengths: NDArray[np.int64] = self.offsets[1:] - self.offsets[:-1]
        return lengths

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> NDArray[Any] | bytes:
        if not -len(self) <= index < len(self):
            raise IndexError(f"Index {index} is out of range for {len(self)} samples.")
        index %= len(self)
        sample = self.values[self.offsets[index] : self.offsets[index + 1]]
        return sample.tobytes() if self.is_bytes else sample

    def __iter__(self) -> Iterator[NDArray[Any] | bytes]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        dtype = "bytes" if self.is_bytes else str(self.values.dtype).removeprefix("torch.")
        return f"Ragged({len(self)} samples, {len(self.values)} values of {dtype})"


def _writable(values: Any) -> Any:
    """The same memory in a dtype that can be indexed: torch cannot write to places of wide unsigned integers."""
    name = str(values.dtype)
    if name not in ("torch.uint16", "torch.uint32", "torch.uint64"):
        return values
    return values.view(getattr(sys.modules["torch"], name.removeprefix("torch.u")))


def offsets_of(lengths: NDArray[Any] | Sequence[int]) -> NDArray[np.int64]:
    """Where each of these lengths begins when laid side by side, and finally where the last one ends.

    >>> offsets_of([2, 0, 1]).tolist()
    [0, 2, 2, 3]
    """
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def take_samples(column: Ragged | NDArray[Any], places: NDArray[np.int64]) -> Ragged | NDArray[Any]:
    """The samples at these places of a column."""
    return column.take(places) if isinstance(column, Ragged) else column[places]


def join_samples(parts: Sequence[Ragged | NDArray[Any]]) -> Ragged | NDArray[Any]:
    """The samples of all parts of a column; there must be at least one part."""
    ragged = [part for part in parts if isinstance(part, Ragged)]
    if ragged:
        return Ragged.concatenate(ragged)
    return np.concatenate([part for part in parts if not isinstance(part, Ragged)])

"""Samples of uneven length, side by side in one array."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, overload

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Sample `i` is `values[offsets[i]:offsets[i + 1]]`; byte strings come out as `bytes`.

    Values and offsets are arrays, or tensors in batches of a DataLoader. The values of samples that are several byte
    strings are a `Ragged` of those; such a sample comes out as a list.

    >>> ragged = Ragged(np.array([5, 6, 7]), np.array([0, 2, 2, 3]))
    >>> [sample.tolist() for sample in ragged]
    [[5, 6], [], [7]]
    """

    values: Any
    offsets: NDArray[np.int64]
    is_bytes: bool = False

    @classmethod
    def from_lengths(cls, values: Any, lengths: NDArray[Any] | Sequence[int], is_bytes: bool = False) -> Self:
        """Samples of these lengths, one after the other in `values`."""
        return cls(values, offsets_of(lengths), is_bytes)

    @classmethod
    def concatenate(cls, parts: Sequence[Ragged]) -> Self:
        """The samples of all parts; there must be at least one part."""
        values = [part.values[part.offsets[0] : part.offsets[-1]] for part in parts]
        lengths = [part.lengths for part in parts]
        return cls.from_lengths(join_samples(values), np.concatenate(lengths), parts[0].is_bytes)

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
            is_value = np.repeat(is_taken, lengths)
            values = take_samples(self.values[self.offsets[0] : self.offsets[-1]], is_value)
            return Ragged.from_lengths(values, lengths[indices], self.is_bytes)
        offsets = offsets_of(lengths[indices])
        places = np.repeat(self.offsets[indices] - offsets[:-1], lengths[indices]) + np.arange(offsets[-1])
        return Ragged(take_samples(self.values, places), offsets, self.is_bytes)

    def padded(self, value: float = 0, *, multiple: int = 1, side: Literal["right", "left"] = "right") -> NDArray[Any]:
        """One array, or tensor, as wide as the longest sample, with `value` as padding.

        Args:
            value: What to pad with.
            multiple: Round the width up to a multiple of this.
            side: Which side to pad.

        >>> Ragged(np.array([5, 6, 7]), np.array([0, 2, 2, 3])).padded(-1).tolist()
        [[5, 6], [-1, -1], [7, -1]]
        """
        if self.is_bytes or self.is_nested:
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
        if self.is_bytes or self.is_nested or not self._is_of_tensors:
            raise TypeError("nested() needs a Ragged of tensors, as a DataLoader delivers; this one holds arrays.")
        return sys.modules["torch"].nested.nested_tensor_from_jagged(self.values, self.offsets)

    @property
    def is_nested(self) -> bool:
        """Whether a sample is several byte strings."""
        return isinstance(self.values, Ragged)

    @property
    def parts(self) -> tuple[Ragged, ...]:
        """As it is stored (`Column.stored`): for several byte strings, all bytes of each sample, and their sizes."""
        if not self.is_nested:
            return (self,)
        strings = self.values
        return (
            Ragged(strings.values, strings.offsets[self.offsets], is_bytes=True),
            Ragged(strings.lengths, self.offsets),
        )

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

    @overload
    def __getitem__(self, index: slice) -> Ragged: ...
    @overload
    def __getitem__(self, index: int) -> Any: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            begin, end, step = index.indices(len(self))
            if step != 1:
                raise TypeError(f"{index}: samples of a Ragged are sliced one after the other; `take` picks others.")
            return Ragged(self.values, self.offsets[begin : max(begin, end) + 1], self.is_bytes)
        if not -len(self) <= index < len(self):
            raise IndexError(f"Index {index} is out of range for {len(self)} samples.")
        index %= len(self)
        sample = self.values[self.offsets[index] : self.offsets[index + 1]]
        if self.is_nested:
            return list(sample)
        return sample.tobytes() if self.is_bytes else sample

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        if self.is_nested:
            return f"Ragged({len(self)} samples of {len(self.values)} byte strings)"
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


def is_byte_strings(samples: Iterable[Any]) -> bool:
    """Whether each sample is a list of byte strings, and one of them has some."""
    lists = [sample for sample in samples if not (isinstance(sample, (list, tuple)) and not sample)]
    return bool(lists) and all(
        isinstance(sample, (list, tuple)) and all(isinstance(each, bytes) for each in sample) for sample in lists
    )


def join_parts(strings: Ragged, sizes: Ragged) -> Ragged:
    """Samples of several byte strings, from `Ragged.parts`.

    Raises:
        ValueError: the sizes of a sample's strings are not those of its bytes.
    """
    offsets = offsets_of(sizes.values[sizes.offsets[0] : sizes.offsets[-1]])
    own = sizes.offsets - sizes.offsets[0]
    if (offsets[1:] < offsets[:-1]).any() or not np.array_equal(offsets[own], strings.offsets - strings.offsets[0]):
        raise ValueError("the sizes of byte strings do not add up to their bytes")
    values = strings.values[strings.offsets[0] : strings.offsets[-1]]
    return Ragged(Ragged(values, offsets, is_bytes=True), own)


def take_samples(column: Ragged | NDArray[Any], places: NDArray[Any]) -> Any:
    """The samples at these places of a column, or where a mask is True."""
    if isinstance(column, Ragged):
        return column.take(np.flatnonzero(places) if places.dtype == np.bool_ else places)
    return column[places]


def join_samples(parts: Sequence[Ragged | NDArray[Any]]) -> Any:
    """The samples of all parts of a column; there must be at least one part."""
    ragged = [part for part in parts if isinstance(part, Ragged)]
    if ragged:
        return Ragged.concatenate(ragged)
    return np.concatenate([part for part in parts if not isinstance(part, Ragged)])

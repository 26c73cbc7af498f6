"""Row sources: what row i of an endless run holds.

The run is one endless sequence of epochs of `num_rows` rows each; row numbers are absolute. A row
source answers any set of them, in any order, from nothing but the numbers. Which row of the data
stands at which position of an epoch is the business of `_epochs.py`; what the row holds is the source's:

    SampleRows   each sample (`_sample_rows.py`)
    WindowRows   fixed windows of all tokens (`_window_rows.py`)
    PackedRows   whole documents side by side (`_packed.py`)
    MixedRows    rows of several of these (`_mixture.py`)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

Batch = dict[str, Any]
Rows = NDArray[np.int64]

IGNORED = -100
"""The label of a place that nothing is predicted at; what torch's losses leave out."""


class RowSource(Protocol):
    """Rows by absolute number."""

    num_rows: int
    """Rows in an epoch."""
    makes_labels: bool
    """Whether its `labels` are targets that it made, and no column that happens to have the name."""
    is_rectangular: bool
    """Whether a batch is nothing but its rows, side by side in the arrays that `output_arrays` names."""

    @property
    def order_identity(self) -> Any:
        """JSON of everything that decides which data is row i."""
        ...

    def read(self, rows: Rows, out: Mapping[str, NDArray[Any]] | None) -> Batch:
        """These rows, side by side; `out` offers arrays to fill."""
        ...

    def output_arrays(self, num_rows: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """(shape, dtype) of the arrays that `out` may offer."""
        ...

    def announce(self, row: int) -> None:
        """Tell the kernel which data an absolute row and those after it need."""
        ...

    def release(self, row: int) -> None:
        """Tell the kernel which data is done with, once rows are read in order up to an absolute row."""
        ...


def offered(out: Mapping[str, NDArray[Any]] | None, key: str, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """The array offered for `key`, or a new one.

    Raises:
        TypeError: what is offered is no array.
        ValueError: the array offered has another shape or dtype, or cannot be written in one piece.
    """
    array = (out or {}).get(key)
    if array is None:
        return np.empty(shape, dtype)
    if not isinstance(array, np.ndarray):
        raise TypeError(f"out[{key!r}] is {type(array).__name__}; a numpy array is needed.")
    if array.shape != shape or array.dtype != dtype or not (array.flags.c_contiguous and array.flags.writeable):
        kind = "" if array.flags.writeable else "read-only "
        kind += "" if array.flags.c_contiguous else "strided "
        raise ValueError(
            f"out[{key!r}] is {kind}{array.dtype} {list(array.shape)}; "
            f"writeable, contiguous {np.dtype(dtype)} {list(shape)} is needed."
        )
    return array

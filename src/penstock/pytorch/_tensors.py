"""Arrays as tensors of the same memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

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

    A ragged column becomes a `Ragged` of tensors, byte strings a list of `bytes`; numbers stay as they are, and
    so do arrays of what no tensor holds.
    """
    return {key: _convert(value) for key, value in batch.items()}


def _convert(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _tensor(value)
    if isinstance(value, Ragged):
        if value.is_bytes:
            return list(value)
        return Ragged(_tensor(value.values), _tensor(value.offsets))  # type: ignore[arg-type]
    return value


def _tensor(array: NDArray[Any]) -> torch.Tensor | NDArray[Any]:
    try:
        return torch.from_numpy(array)
    except TypeError:
        known = _BY_NAME.get(array.dtype.name)
        return array if known is None else torch.from_numpy(array.view(known[0])).view(known[1])

"""Who may look at whom: attention masks from a packed batch, for each attention backend, and slices of its rows.

Everything follows from the batch's own boundaries, on the device where the batch is. Training code calls it.

May import: `errors`. Imported by: `integrations`. Holds no state.
"""

from penstock.errors import MissingExtra

try:
    import torch as _torch  # noqa: F401  (asked for here so that its absence is explained once)
except ModuleNotFoundError as error:
    raise MissingExtra("penstock.masks needs PyTorch: pip install 'penstock-data[torch]'") from error

from penstock.masks._attention import block_mask, check_isolation, dense, from_token, hugging_face_kwargs, varlen
from penstock.masks._batch import context_slice
from penstock.masks._pictures import mrope_position_ids

__all__ = [
    "block_mask",
    "check_isolation",
    "context_slice",
    "dense",
    "from_token",
    "hugging_face_kwargs",
    "mrope_position_ids",
    "varlen",
]

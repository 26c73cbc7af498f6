"""`penstock.DataLoader`: batches as tensors, ahead of the training loop.

May import: `errors`, `loader`, `plan`, `schema`, `sources`, `streams`, `workers`. Imported by: `cli`. Holds state:
which warnings were given already.
"""

try:
    import torch as _torch  # noqa: F401 - asked for here, so that its absence is explained in one place
except ImportError as error:
    from penstock.errors import MissingExtra

    raise MissingExtra("penstock.DataLoader and penstock.stream need PyTorch: pip install 'penstock[torch]'") from error

from penstock.pytorch._dataloader import DataLoader
from penstock.pytorch._stream import Stream, stream

__all__ = ["DataLoader", "Stream", "stream"]

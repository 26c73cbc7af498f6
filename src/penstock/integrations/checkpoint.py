"""`torch.distributed.checkpoint`, with the state of a torch dataset's loader.

The loader of a plan needs nothing: `dcp.save({"model": model, "data": loader})`. Its state is the same on all ranks
and of one shape, so any number of ranks may load it. A torch dataset's is neither: each rank has its own random
numbers, and which entries there are depends on where the run stands, while a checkpoint is loaded entry by entry into
the shape that is there. So each rank's state becomes one entry, under the rank's name.
"""

import io
from typing import Any, Protocol

import torch
import torch.distributed as distributed


class HasState(Protocol):
    """A loader: `penstock.DataLoader`, torchdata's `StatefulDataLoader`."""

    def state_dict(self) -> dict[str, Any]:
        """Where it stands."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where a state stands."""
        ...


class RankState:
    """The state of this rank's loader as one entry of a distributed checkpoint: `{"data": RankState(loader)}`.

    As many ranks as saved it, or fewer, can load it.
    """

    def __init__(self, loader: HasState) -> None:
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        """One entry, of bytes."""
        buffer = io.BytesIO()
        torch.save(self._loader.state_dict(), buffer)
        return {self._key: buffer.getvalue()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where this rank's state stands; nothing in it but plain data and tensors is accepted."""
        self._loader.load_state_dict(torch.load(io.BytesIO(state_dict[self._key]), weights_only=True))

    @property
    def _key(self) -> str:
        is_one_of_many = distributed.is_available() and distributed.is_initialized()
        return f"rank_{distributed.get_rank() if is_one_of_many else 0}"

"""How torch's own `DataLoader` gets a whole batch from a plan.

Torch's loader asks a dataset for the samples that its batch sampler names. A plan has no samples to give, and a batch
is more than its samples: packed rows, batched maps, targets counted over all ranks. So a batch sampler made for a plan
names whole batches, and plans and datasets answer such a name with what it stands for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class WholeBatch(ABC):
    """Stands where torch's loader has the indices of a batch."""

    @abstractmethod
    def take(self) -> dict[str, Any]:
        """The batch."""

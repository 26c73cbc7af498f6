"""The loader: what a training loop iterates over."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any, Literal, Self

from penstock.loader import LoaderStatistics
from penstock.plan import Plan
from penstock.pytorch._plan_run import PlanRun
from penstock.pytorch._settings import LoaderSettings, Workers


class DataLoader:
    """Runs a plan ahead of the training loop and hands over batches as dicts of tensors.

    `for batch in loader` runs to the end of the epoch and continues where the state stands: after a full
    pass with the next epoch, after `load_state_dict` with the rest of the epoch.

    Args:
        plan: What to load; it ends with `batch()`.
        workers: "thread", "process", "inline", or "auto".
        num_workers: How many; "auto" starts from the processors that this job may use.
        prefetch: Batches computed ahead; two per worker by default.
        in_order: Hand batches over in order.
        rank, world_size: This training process among all; by default from torch.distributed, torchrun or Slurm.
        micro_batch: Hand a step's rows out in pieces of this many.
        epochs: Epochs in one `for` loop; None never stops.
        start_method: How worker processes start.

    >>> import numpy as np, penstock
    >>> plan = penstock.from_arrays({"x": np.arange(6)}).batch(2)
    >>> with DataLoader(plan) as loader:
    ...     [batch["x"].tolist() for batch in loader]
    [[0, 1], [2, 3], [4, 5]]
    """

    def __init__(
        self,
        plan: Plan,
        *,
        workers: Workers = "auto",
        num_workers: int | Literal["auto"] = "auto",
        prefetch: int | None = None,
        in_order: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
        micro_batch: int | None = None,
        epochs: int | None = 1,
        start_method: Literal["forkserver", "spawn", "fork"] = "forkserver",
    ) -> None:
        if not isinstance(plan, Plan):
            raise TypeError(
                f"DataLoader takes a plan, as in ds.shuffle(seed=7).batch(32); this is {type(plan).__name__}."
            )
        if (rank is None) != (world_size is None):
            raise ValueError("Give both rank and world_size, or neither.")
        self.settings = LoaderSettings(
            workers=workers,
            num_workers=num_workers,
            prefetch=prefetch,
            in_order=in_order,
            micro_batch=micro_batch,
            epochs=epochs,
            start_method=start_method,
        )
        given_rank = None if rank is None or world_size is None else (rank, world_size)
        self._run = PlanRun(plan, self.settings, given_rank)

    @property
    def kind(self) -> str:
        """What computes: "inline", "thread" or "process"."""
        return self._run.kind

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Batches from where the state stands to the end of the epoch."""
        return self._run.__iter__()

    def __len__(self) -> int:
        """Batches of the loop that runs, and outside of one, of the next."""
        return len(self._run)

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands: rows handed over, not rows computed ahead. Under 1 KB.

        Raises:
            StateError: batches do not come in order, so no row says what was handed over.
        """
        return self._run.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where a state stands; batch size, ranks, workers and maps may differ from when it was saved.

        Raises:
            StateError: the state belongs to another order of the data.
        """
        self._run.load_state_dict(state)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; the epoch that runs is not rewound."""
        self._run.set_epoch(epoch)

    def set_workers(self, num_workers: int) -> None:
        """Use more or fewer workers from now on; no batch changes."""
        self._run.set_workers(num_workers)

    def set_prefetch(self, prefetch: int) -> None:
        """Compute more or fewer batches ahead from now on; no batch changes."""
        self._run.set_prefetch(prefetch)

    def stats(self) -> LoaderStatistics:
        """What was measured so far."""
        return self._run.stats()

    def close(self) -> None:
        """Stop the workers. The next `for` loop starts them again."""
        self._run.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

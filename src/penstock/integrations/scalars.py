"""What a loader measures, as scalars for TensorBoard, Weights & Biases, MLflow and the like.

`penstock.watch(loader, log=...)` calls `log(scalars, step)` every few steps: `wandb.log` and `mlflow.log_metrics` can
be given as they are, and `to_tensorboard(writer)` makes one of a `SummaryWriter`. Where a framework owns the loop,
`LoaderScalars` gives the same names from the loader's own statistics, which are always on.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from penstock.loader import LoaderStatistics


class HasStatistics(Protocol):
    """A `penstock.DataLoader`."""

    def stats(self) -> LoaderStatistics:
        """What was measured so far; it does not change afterwards."""
        ...


class Writer(Protocol):
    """A `torch.utils.tensorboard.SummaryWriter`."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Add a value of a curve."""
        ...


class LoaderScalars:
    """Means per step since they were last asked for, under the names that `penstock.watch` has for them.

    >>> import numpy as np, penstock
    >>> loader = penstock.DataLoader(penstock.from_arrays({"x": np.arange(8)}).batch(2), num_workers=0)
    >>> scalars = LoaderScalars(loader)
    >>> for batch in loader: pass
    >>> sorted(scalars.take())
    ['data/batches_ready', 'data/step_seconds', 'data/steps_per_second', 'data/wait_seconds', 'data/wait_share']
    >>> scalars.take()
    {}
    """

    def __init__(self, loader: HasStatistics) -> None:
        self._loader = loader
        self._before = loader.stats()

    def take(self) -> dict[str, float]:
        """The scalars; none when no batch was handed over since."""
        before, now = self._before, self._loader.stats()
        num_steps = now.num_batches - before.num_batches
        if num_steps <= 0:
            return {}
        self._before = now
        wait = (now.wait_seconds - before.wait_seconds) / num_steps
        step = (now.step_seconds - before.step_seconds) / num_steps
        both = max(wait + step, 1e-9)
        return {
            "data/wait_share": wait / both,
            "data/steps_per_second": 1 / both,
            "data/wait_seconds": wait,
            "data/step_seconds": step,
            "data/batches_ready": float(now.num_queued),
        }


def to_tensorboard(writer: Writer) -> Callable[[Mapping[str, float], int], None]:
    """What `penstock.watch(loader, log=...)` takes, writing to a `SummaryWriter`."""

    def log(scalars: Mapping[str, float], step: int) -> None:
        for name, value in scalars.items():
            writer.add_scalar(name, value, step)

    return log

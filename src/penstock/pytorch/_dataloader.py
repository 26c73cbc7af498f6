"""The loader for plans: what a training loop iterates over."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Literal, Self

import torch

from penstock.errors import StateError
from penstock.loader import Cursor, Item, LoaderStatistics, Pipeline, PlanWork, make_engine
from penstock.plan import Plan
from penstock.pytorch._ranks import find_rank
from penstock.pytorch._settings import LoaderSettings, Workers
from penstock.pytorch._tensors import as_tensors


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
        self.plan = plan
        self.settings = LoaderSettings(
            workers=workers,
            num_workers=num_workers,
            prefetch=prefetch,
            in_order=in_order,
            micro_batch=micro_batch,
            epochs=epochs,
            start_method=start_method,
        )
        self.kind, self._num_workers = self.settings.resolve(plan)
        self._prefetch = prefetch or (2 * self._num_workers if self._num_workers else 1)
        self._given_rank = None if rank is None or world_size is None else (rank, world_size)
        self._cursor = Cursor(plan)
        self._statistics = LoaderStatistics()
        self._pipeline: Pipeline | None = None
        self._engine: Any = None
        self._is_unfinished = False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Batches from where the state stands to the end of the epoch."""
        self._leave_unfinished_epoch()
        return self._iterate()

    def __len__(self) -> int:
        """Batches that the next `for` loop gives."""
        if self.settings.epochs is None:
            raise TypeError("This loader never stops: epochs=None.")
        end = (self._cursor.epoch + self.settings.epochs) * self.plan.num_rows
        return self.plan.num_batches_between(self._cursor.row, end) * self._num_parts(*self._ranks())

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands: rows handed over, not rows computed ahead. Under 1 KB.

        Raises:
            StateError: batches do not come in order, so no row says what was handed over.
        """
        if not self.settings.in_order:
            raise StateError("With in_order=False no single row says which batches were handed over.")
        return self._cursor.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where a state stands; batch size, ranks, workers and maps may differ from when it was saved.

        Raises:
            StateError: the state belongs to another order of the data.
        """
        self._move_to(self._cursor.restore(state))

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; the epoch that runs is not rewound."""
        if epoch != self._cursor.epoch:
            self._move_to(Cursor(self.plan, epoch * self.plan.num_rows))

    def set_workers(self, num_workers: int) -> None:
        """Use more or fewer workers from now on; no batch changes."""
        if num_workers < 1:
            raise ValueError(f"num_workers={num_workers}; at least one is needed.")
        self._num_workers = num_workers
        if self._engine is not None:
            self._engine.set_workers(num_workers)

    def set_prefetch(self, prefetch: int) -> None:
        """Compute more or fewer batches ahead from now on; no batch changes."""
        if prefetch < 1:
            raise ValueError(f"prefetch={prefetch}; at least one is needed.")
        self._prefetch = prefetch
        if self._pipeline is not None:
            self._pipeline.prefetch = prefetch

    def stats(self) -> LoaderStatistics:
        """What was measured so far."""
        return dataclasses.replace(self._statistics)

    def close(self) -> None:
        """Stop the workers. The next `for` loop starts them again."""
        pipeline, self._pipeline, self._engine = self._pipeline, None, None
        if pipeline is not None:
            pipeline.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _iterate(self) -> Iterator[dict[str, Any]]:
        rank, world_size = self._ranks()
        num_parts = self._num_parts(rank, world_size)
        pipeline = self._start()
        pipeline.start(self._items(rank, world_size, num_parts))
        self._is_unfinished = True
        while True:
            with torch.profiler.record_function("penstock.wait"):
                found = pipeline.next()
            if found is None:
                break
            item, arrays = found
            begin = time.perf_counter()
            batch = as_tensors(arrays)
            self._statistics.copy_seconds += time.perf_counter() - begin
            if item.part == num_parts - 1:
                self._cursor = Cursor(self.plan, self.plan.settle(self.plan.next_row(item.row)))
                self._is_unfinished = not self._is_at_end
            del arrays, found
            yield batch
            del batch
        self._is_unfinished = False

    def _items(self, rank: int, world_size: int, num_parts: int) -> Iterator[Item]:
        """Items from where the state stands to the end of this loop's last epoch."""
        row = self.plan.settle(self._cursor.row)
        epochs = self.settings.epochs
        self._end = None if epochs is None else (self._cursor.epoch + epochs) * self.plan.num_rows
        while self._end is None or row < self._end:
            for part in range(num_parts):
                yield Item(row, rank, world_size, part, num_parts)
            row = self.plan.settle(self.plan.next_row(row))

    @property
    def _is_at_end(self) -> bool:
        return self._end is not None and self._cursor.row >= self._end

    def _start(self) -> Pipeline:
        if self._pipeline is None:
            work = PlanWork(self.plan)
            self._engine = make_engine(
                work, kind=self.kind, num_workers=self._num_workers, start_method=self.settings.start_method
            )
            self._pipeline = Pipeline(
                self._engine, work, self._statistics, prefetch=self._prefetch, in_order=self.settings.in_order
            )
        return self._pipeline

    def _ranks(self) -> tuple[int, int]:
        return self._given_rank or find_rank()

    def _num_parts(self, rank: int, world_size: int) -> int:
        size = self.settings.micro_batch
        if size is None:
            return 1
        share = self.plan.global_size // world_size
        if share % size:
            raise ValueError(f"micro_batch={size} does not divide the {share} rows that each rank has per step.")
        return share // size

    def _leave_unfinished_epoch(self) -> None:
        """After a `break`, the next loop is the next epoch, and says which rows it leaves out."""
        if not self._is_unfinished:
            return
        self._is_unfinished = False
        cursor = self._cursor
        warnings.warn(
            f"The last loop left epoch {cursor.epoch} early: its last {cursor.end_of_epoch - cursor.row:,} rows are "
            "skipped and the next epoch starts. To go on where it was left instead, call "
            "loader.load_state_dict(loader.state_dict()) before the loop.",
            stacklevel=3,
        )
        self._cursor = Cursor(self.plan, cursor.end_of_epoch)

    def _move_to(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self._is_unfinished = False

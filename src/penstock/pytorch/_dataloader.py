"""The loader: what a training loop iterates over."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.context import BaseContext
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch.utils.data import BatchSampler, Sampler
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset as TorchDataset
from typing_extensions import TypeVar  # torch needs it, too; defaults are in `typing` from 3.13 on

from penstock.loader import LoaderStatistics
from penstock.plan import Dataset, Plan
from penstock.pytorch._arguments import (
    ARGUMENTS,
    LoaderSettings,
    Workers,
    check_torch_arguments,
    defaults_of,
    torchs_arguments,
)
from penstock.pytorch._device import find_device
from penstock.pytorch._pinning import wants_pinning
from penstock.pytorch._plan_run import PlanRun
from penstock.pytorch._plan_source import PlanSampler, find_plan, plan_attributes
from penstock.pytorch._stream import Stream
from penstock.pytorch._torch_run import TorchRun
from penstock.pytorch._warnings import warn_odd_batch_size, warn_too_many_workers
from penstock.workers import StartMethod

BatchType = TypeVar("BatchType", covariant=True, default=Any)


class DataLoader(TorchDataLoader[BatchType]):
    """Loads a plan, a Penstock dataset or any torch dataset ahead of the training loop.

    With a torch dataset every argument means what it means in `torch.utils.data.DataLoader`, and the same seeds
    give the same batches. With a plan, `for batch in loader` runs to the end of the epoch and continues where
    the state stands: after a full pass with the next epoch, after `load_state_dict` with the rest of the epoch.
    A Penstock dataset with torch's arguments becomes a plan, unless they ask for Python per sample.

    Args:
        dataset: What to load; a plan ends with `batch()`.
        batch_size, shuffle, sampler, batch_sampler, collate_fn, drop_last, worker_init_fn, multiprocessing_context,
            generator: torch's; a plan has its own ways for them.
        pin_memory, timeout, prefetch_factor, persistent_workers, pin_memory_device, in_order: torch's.
        num_workers: How many. By default none for torch datasets, and for plans "auto", which starts from the
            processors that this job may use.
        workers: For plans: "thread", "process", "inline", or "auto".
        prefetch: For plans: batches computed ahead; two per worker by default.
        rank, world_size: For plans: this training process among all; by default from torch.distributed, torchrun
            or Slurm.
        micro_batch: For plans: hand a step's rows out in pieces of this many.
        epochs: For plans: epochs in one `for` loop; None never stops.
        start_method: For plans: how worker processes start.
        drop_consumed: For plans: let data that was read leave the page cache.
        device: Hand batches over on this device: copied from pinned memory, on a stream of their own, one batch
            ahead of the training loop.

    >>> import numpy as np, penstock
    >>> plan = penstock.from_arrays({"x": np.arange(6)}).batch(2)
    >>> with DataLoader(plan) as loader:
    ...     [batch["x"].tolist() for batch in loader]
    [[0, 1], [2, 3], [4, 5]]
    >>> [batch.tolist() for batch in DataLoader(range(5), batch_size=2)]
    [[0, 1], [2, 3], [4]]
    """

    def __init__(
        self,
        dataset: Plan | Dataset | TorchDataset[Any] | Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int | Literal["auto"] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: str | BaseContext | None = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        workers: Workers = "auto",
        prefetch: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        micro_batch: int | None = None,
        epochs: int | None = 1,
        start_method: StartMethod = "forkserver",
        drop_consumed: bool = False,
        device: str | int | torch.device | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in ARGUMENTS}
        if (rank is None) != (world_size is None):
            raise ValueError("Give both rank and world_size, or neither.")
        self.workers, self.prefetch, self.rank, self.world_size = workers, prefetch, rank, world_size
        self.micro_batch, self.epochs, self.start_method = micro_batch, epochs, start_method
        self.drop_consumed, self.device = drop_consumed, device
        find_device(device)  # one that is not there is an error here, not at the first batch
        self._source = find_plan(dataset, given, _DEFAULTS)
        if self._source is None:
            check_torch_arguments(given, _DEFAULTS)
            arguments = torchs_arguments(given, is_plan=False) | {"num_workers": num_workers or 0}
        else:
            plan = self._source.make()
            self.settings = LoaderSettings.for_plan(plan, given)
            _, count = self.settings.resolve(plan)
            arguments = torchs_arguments(given, is_plan=True) | plan_attributes(self._source, micro_batch, world_size)
            arguments["num_workers"] = count
            arguments["prefetch_factor"] = prefetch_factor if count else None
            arguments["persistent_workers"] = persistent_workers and count > 0
        super().__init__(dataset, **arguments)  # type: ignore[arg-type]
        self._run = self._make_run()
        if self._source is not None and self._run.kind == "process":
            warn_too_many_workers(self.num_workers)
        if self.batch_size is not None:
            warn_odd_batch_size(self.batch_size)

    @property
    def kind(self) -> str:
        """What computes: "inline", "thread" or "process"."""
        return self._run.kind

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Batches from where the state stands to the end of the epoch."""
        self._meet_ranks()
        return iter(self._run)

    def __len__(self) -> int:
        """Batches of an epoch; with a plan, of the epoch that runs, and outside of one, of the next."""
        self._meet_ranks()
        return len(self._run) if isinstance(self._run, PlanRun) else super().__len__()

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands: what was handed over, not what was computed ahead. Under 1 KB for a plan.

        Raises:
            StateError: batches do not come in order, so nothing says what was handed over.
        """
        return self._run.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where a state stands.

        With a plan, batch size, ranks, workers and maps may differ from when it was saved; with a torch map-style
        dataset the number of workers may. An iterable dataset is asked for its own state; one that has none is read
        again from the beginning.

        Raises:
            StateError: the state belongs to another order of the data.
        """
        self._run.load_state_dict(state)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch of a plan, unless it runs; with a torch dataset, tell it and the sampler."""
        self._run.set_epoch(epoch)

    def set_workers(self, num_workers: int) -> None:
        """Use more or fewer workers from now on; no batch changes. For plans."""
        self._run.set_workers(num_workers)
        self.num_workers = num_workers

    def set_prefetch(self, prefetch: int) -> None:
        """Compute more or fewer batches ahead from now on; no batch changes. For plans."""
        self._run.set_prefetch(prefetch)

    def stats(self) -> LoaderStatistics:
        """What was measured so far."""
        return self._run.stats()

    def close(self) -> None:
        """Stop the workers. The next `for` loop starts them again."""
        self._run.close()

    def check_worker_number_rationality(self) -> None:
        """Torch calls this when a loader is made, and when a loop begins."""
        if self._source is None:
            warn_too_many_workers(self.num_workers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """A copy, in this process or another, is a loader that has not begun."""
        return {name: value for name, value in vars(self).items() if name != "_run"} | {"_iterator": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self._source is not None:  # a sampler counts the epochs of one loader; a shallow copy came with the other's
            assert self.batch_size is not None
            sampler = copy.copy(self.sampler)
            vars(self).update(sampler=sampler, batch_sampler=BatchSampler(sampler, self.batch_size, self.drop_last))
        self._run = self._make_run()

    def _make_run(self) -> PlanRun | TorchRun:
        # What splits itself over ranks Accelerate must leave as it is, or give each a share of its share.
        if self._source is None:
            if isinstance(self.dataset, Stream) and self.dataset.splits_over_ranks:
                self._is_accelerate_prepared = True
                self.dataset.leave_alone()
            return TorchRun(self)
        self._is_accelerate_prepared = True
        assert isinstance(self.sampler, PlanSampler)
        self.sampler.belong_to(self)
        given_rank = None if self.rank is None or self.world_size is None else (self.rank, self.world_size)
        pins = self.device is None and wants_pinning(self.pin_memory, self.pin_memory_device)
        return PlanRun(self._source.make(), self.settings, given_rank, device=find_device(self.device), pin_memory=pins)

    def _meet_ranks(self) -> None:
        """A dataset's plan depends on the number of ranks, and loaders are often made before ranks know each other."""
        if not isinstance(self._run, PlanRun) or self._source is None or self._source.is_fixed:
            return
        if self._run.plan.global_size != self._source.make().global_size:
            state = self._run.state_dict() if self.in_order else None
            self._run.close()
            self._run = self._make_run()
            if state is not None:
                self._run.load_state_dict(state)


_DEFAULTS = defaults_of(DataLoader.__init__)
"""Read once from the signature, the only place where they are written."""

"""The loader: what a training loop iterates over.

It inherits from torch's, so that frameworks take it for one, but a run does the work: `PlanRun` for a plan, or for a
Penstock dataset with arguments that need no Python per sample, and `TorchRun` for any other dataset. What is here sorts
the arguments (`_arguments`), chooses the run, and shows frameworks what they look for (`_plan_view`).
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import Sampler
from typing_extensions import TypeVar  # torch needs it, too; defaults are in `typing` from 3.13 on

from penstock.errors import ScriptError
from penstock.loader import LoaderStatistics
from penstock.machine import default_workers
from penstock.plan import Dataset, Plan
from penstock.pytorch._arguments import (
    ARGUMENTS,
    LoaderSettings,
    Workers,
    check_torch_arguments,
    defaults_of,
    torchs_arguments,
    with_settings,
)
from penstock.pytorch._device import find_device
from penstock.pytorch._feed import wants_pinning
from penstock.pytorch._plan_run import PlanRun
from penstock.pytorch._plan_view import PlanBatchSampler, PlanSampler, find_plan, find_run, shown_arguments
from penstock.pytorch._ranks import find_data_rank
from penstock.pytorch._torch_run import TorchRun
from penstock.pytorch._warnings import log_odd_batch_size, log_runs, warn_of_lost_cpus, warn_too_many_workers
from penstock.workers import StartMethod

if TYPE_CHECKING:
    from penstock.service import Remote, Servers

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
        num_workers: How many. By default none for torch datasets, and "auto" for plans: start with the processors that
            this job may use, and adjust the number by the step rate while training runs. Map-style torch datasets take
            "auto" too: random numbers are then seeded for each batch, whichever worker computes it.
        workers: For plans: "thread", "process", "inline", or "auto".
        prefetch: For plans: batches computed ahead; two per worker at the start, and with "auto" as many as help.
        mesh: For plans: the device mesh of a job that is parallel in several ways; ranks that share a data-parallel
            rank get the same batch.
        rank, world_size: For plans: which training process this is, and how many there are; by default from
            torch.distributed, torchrun or Slurm.
        micro_batch: For plans: hand out a step's rows in pieces of this many.
        epochs: For plans: epochs in one `for` loop; None never stops.
        steps: For plans: steps in one `for` loop, instead of `epochs`; the next loop continues from there.
        start_method: For plans: how worker processes start.
        drop_consumed: For plans: let data that was read leave the page cache.
        remote: For plans: servers that compute the batches instead of workers (`penstock serve`): addresses, a host
            name or a file that stands for several, or `penstock.Remote` with timeouts, a token and TLS.
        local_workers: For plans with `remote`: workers on this machine that take a share, and continue without servers.
        device: Hand batches over on this device: copied from pinned memory, on a separate stream, one batch ahead of
            the training loop.
        on_device: With `device`: a function of a batch that is on its way there, called on the stream of copies, such
            as a decoder of pictures or films; it returns the batch. Byte strings come to it as they are.
        settings: A file that `penstock tune` wrote: its options are used for arguments that are not given.
        snapshot_every_n_steps: torchdata's, for scripts written for its `StatefulDataLoader`. A state here is
            always that of the last batch handed over, so this changes nothing.

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
        prefetch: int | Literal["auto"] | None = None,
        mesh: DeviceMesh | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        micro_batch: int | None = None,
        epochs: int | None = 1,
        steps: int | None = None,
        start_method: StartMethod = "forkserver",
        drop_consumed: bool = False,
        remote: Remote | Servers | None = None,
        local_workers: int = 0,
        device: str | int | torch.device | None = None,
        on_device: Callable[[Any], Any] | None = None,
        settings: str | os.PathLike[str] | None = None,
        snapshot_every_n_steps: int = 1,
    ) -> None:
        given = with_settings({name: value for name, value in locals().items() if name in ARGUMENTS}, _DEFAULTS)
        num_workers, workers, prefetch, pin_memory = (given[name] for name in _TUNED)
        start_method, drop_consumed = given["start_method"], given["drop_consumed"]
        self._measured_workers = given["measured_workers"]
        self.mesh = mesh
        if (rank is None) != (world_size is None) or (rank is not None and mesh is not None):
            raise ValueError("Give both rank and world_size, or mesh, or none of them.")
        self.workers, self.prefetch, self.rank, self.world_size = workers, prefetch, rank, world_size
        self.micro_batch, self.epochs, self.steps, self.start_method = micro_batch, epochs, steps, start_method
        self.drop_consumed, self.device, self.snapshot_every_n_steps = drop_consumed, device, snapshot_every_n_steps
        self.remote, self.local_workers = remote, local_workers
        self.on_device = on_device
        if on_device is not None and find_device(device) is None:
            raise ValueError(f"on_device={on_device!r} needs device=: it runs on the way to an accelerator.")
        find_device(device)  # one that is not there is an error here, not at the first batch
        if mesh is not None:
            given["rank"], given["world_size"] = find_data_rank(mesh)
        rebuilt = find_run(given)
        self._source = source = find_plan(dataset, given, _DEFAULTS) if rebuilt is None else rebuilt.source
        if source is None:
            check_torch_arguments(given, _DEFAULTS)
            self.tunes_workers = num_workers == "auto"
            count = num_workers or 0
            if self.tunes_workers:  # at least one process, to begin with
                start = given["start_workers"]
                count = default_workers("process") if start is None else max(1, start)
            super().__init__(dataset, **torchs_arguments(given, is_plan=False) | {"num_workers": count})  # type: ignore[arg-type]
            self._run: PlanRun | TorchRun = self._make_torch_run()
        else:
            how = LoaderSettings.for_plan(source.make(), given) if rebuilt is None else rebuilt.settings
            pins = device is None and wants_pinning(pin_memory, pin_memory_device)
            ranks = None if given["rank"] is None else (given["rank"], given["world_size"])
            self._run = PlanRun(source, how, ranks, device=find_device(device), pin_memory=pins, on_device=on_device)
            size = micro_batch or self._run.rows_per_rank
            shown = shown_arguments(torchs_arguments(given, is_plan=True), device)
            super().__init__(dataset, size, sampler=PlanSampler(self._run, size), **shown)  # type: ignore[arg-type]
            self._show_run(self._run)
            if self.kind == "process":
                self._check_num_workers(self._run.num_workers)
            log_runs(self._run.plan, rank)
            self._run.start_early()
        if self.batch_size is not None:
            log_odd_batch_size(self.batch_size)
        warn_of_lost_cpus()

    @property
    def kind(self) -> str:
        """What computes: "inline", "thread", "process" or "remote"."""
        return self._run.kind

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Batches from where the state stands to the end of the epoch."""
        try:
            return iter(self._run)
        except ScriptError as error:
            raise error.with_traceback(None) from None

    def __len__(self) -> int:
        """Batches in an epoch; with a plan, in the epoch that is running, or else in the next."""
        return len(self._run) if isinstance(self._run, PlanRun) else super().__len__()

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands: what was handed over, not what was computed ahead. Under 1 KB for a plan.

        Raises:
            StateError: a plan's batches do not come in order, so no row says what was handed over.
        """
        return self._run.state_dict()

    def load_state_dict(self, state: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Continue where a state stands.

        With a plan, batch size, ranks, workers and maps may differ from when it was saved; with a torch map-style
        dataset the number of workers may. With a `penstock.stream` ranks and workers may, given the states of all ranks
        as a list. Another iterable dataset is asked for its own state; one that has none is read again from the
        beginning.

        Raises:
            StateError: the state belongs to another order of the data.
        """
        self._run.load_state_dict(state)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch of a plan, unless it is running. A torch dataset and its sampler are told."""
        self._run.set_epoch(epoch)

    def set_workers(self, num_workers: int) -> None:
        """Use more or fewer workers from now on; no batch changes. For plans."""
        self._run.set_workers(num_workers)

    def set_prefetch(self, prefetch: int) -> None:
        """Compute more or fewer batches ahead from now on; no batch changes. For plans."""
        self._run.set_prefetch(prefetch)

    def stats(self) -> LoaderStatistics:
        """What has been measured so far."""
        return self._run.stats()

    def close(self) -> None:
        """Stop the workers. The next `for` loop starts them again."""
        self._run.close()

    def check_worker_number_rationality(self) -> None:
        """Torch calls this when a loader is made, and when a loop begins."""
        self._check_num_workers(self.num_workers)

    def _check_num_workers(self, num_workers: int) -> None:
        """Warn about too many workers, unless that number was measured to be best."""
        if num_workers != self._measured_workers:
            warn_too_many_workers(num_workers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """A copy, in this process or another, is a loader that has not begun."""
        state = vars(self) | {"_iterator": None, "mesh": None}  # the run knows its rank; a mesh is of this process
        if isinstance(self._run, TorchRun):
            del state["_run"]
        state.pop(_LIGHTNING_RECORD, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        run = state.get("_run")
        if isinstance(run, PlanRun):
            self._run = copy.copy(run)
            self._show_run(self._run)
        else:
            self._run = self._make_torch_run()

    def _show_run(self, run: PlanRun) -> None:
        """What frameworks see of a plan; see `_plan_view`."""
        assert self.batch_size is not None
        sampler = PlanSampler(run, self.batch_size)
        vars(self).update(sampler=sampler, batch_sampler=PlanBatchSampler(sampler, self.batch_size))
        self._is_accelerate_prepared = True  # it would give each rank a share of its share
        self.use_stateful_dataloader = True  # Accelerate saves and loads its state

    def _make_torch_run(self) -> TorchRun:
        dataset: Any = self.dataset
        if _is_stream(dataset) and dataset.splits_over_ranks:
            self._is_accelerate_prepared = True  # else it would give each rank a share of its share
            dataset.leave_alone()
        return TorchRun(self)


def _is_stream(dataset: Any) -> bool:
    """Whether it is a `Stream`. It cannot be if that module was never loaded, and asking does not load it."""
    module = sys.modules.get("penstock.pytorch._stream")
    return module is not None and isinstance(dataset, module.Stream)


_LIGHTNING_RECORD = "__pl_attrs_record"
"""Where Lightning notes what was ever set on a loader, running loops included, which no copy can have."""
_TUNED = ("num_workers", "workers", "prefetch", "pin_memory")
_DEFAULTS = defaults_of(DataLoader.__init__)
"""Read once from the signature, the only place where they are written."""

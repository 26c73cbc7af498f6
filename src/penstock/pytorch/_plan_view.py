"""What frameworks see of a plan's loader: torch's attributes, from which a loader like it can be built.

Frameworks that train on several processes put a `DistributedSampler` into every loader that has none, or
wrap loaders so that each process gets a share. A plan gives each rank its share already, so its loader says
that this is done: its sampler is a `DistributedSampler`, and Accelerate finds it prepared.

To resume, they build a loader of torch's from the attributes of ours, with a batch sampler that leaves out the
first batches (Accelerate's `skip_first_batches`, and so the Trainer of transformers). So our batch sampler names
batches by number, and the dataset passes such a name back to us:

    SkipBatchSampler(PlanBatchSampler) -> NumberedBatch 700 -> torch's DataLoader -> plan.__getitems__ -> take()
                                                                              batch 700 <- PlanRun from there on

No batch before the first one taken is computed. From it on the run is ahead of torch's loader as it is ahead of a loop
of its own: same workers, pinned memory, device, state. Torch's loader must add nothing to that, so the attributes
show no workers and a `collate_fn` that changes nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import BatchSampler, DistributedSampler

from penstock.loader import Item
from penstock.plan import Dataset, Plan, WholeBatch
from penstock.pytorch._arguments import check_plan_arguments
from penstock.pytorch._batches import as_tensors
from penstock.pytorch._plan_run import PlanRun, PlanSource
from penstock.pytorch._ranks import check_rank


class PlanSampler(DistributedSampler[int]):
    """Stands where frameworks look for a sampler: the order, and this rank's share of it, are the plan's.

    A loader that a framework rebuilds from another's attributes finds the plan here, and how it is run.
    """

    def __init__(self, run: PlanRun, batch_size: int) -> None:
        self.run, self.batch_size = run, batch_size
        self.shuffle = False  # Lightning reads it; shuffling is the plan's

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __len__(self) -> int:
        return len(self.run) * self.batch_size

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, unless the run is in it."""
        self.run.set_epoch(epoch)


class PlanBatchSampler(BatchSampler):
    """The numbers of an epoch's batches, each of which the dataset exchanges for the batch."""

    sampler: PlanSampler

    def __init__(self, sampler: PlanSampler, batch_size: int, drop_last: bool = False) -> None:
        super().__init__(sampler, batch_size, drop_last)

    def __iter__(self) -> Iterator[NumberedBatch]:  # type: ignore[override]
        batches = _EpochBatches(self.sampler.run)
        for number in itertools.count() if batches.length is None else range(batches.length):
            yield NumberedBatch(batches, number)

    def __len__(self) -> int:
        return len(self.sampler.run)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, unless the run is in it; the Trainer of transformers says so here."""
        self.sampler.set_epoch(epoch)


class _EpochBatches:
    """The batches of one epoch by number: in order from any of them on, as the run computes them ahead."""

    def __init__(self, run: PlanRun) -> None:
        self.run = run
        self.length = run.num_batches
        self._epoch: int | None = None
        self._next = 0
        self._loop: Iterator[dict[str, Any]] = iter(())

    def take(self, number: int) -> dict[str, Any]:
        """The batch; those after it are computed ahead."""
        if self._epoch is None or number != self._next:
            self._loop = self.run.iterate_from(number, self._begin())
        batch = next(self._loop)
        self._next = number + 1
        if self._next == self.length:
            next(self._loop, None)  # which ends the loop, and with it the epoch
        return batch

    def item(self, number: int) -> Item:
        """What a batch is computed from, for another process."""
        return self.run.item(number, self._begin())

    def _begin(self) -> int:
        if self._epoch is None:
            self._epoch = self.run.begin_epoch()
        return self._epoch


class NumberedBatch(WholeBatch):
    """A batch of a plan's loader, by its number in the epoch. In another process it is read there, without the run."""

    def __init__(self, batches: _EpochBatches, number: int) -> None:
        self._batches, self._number = batches, number

    def take(self) -> dict[str, Any]:
        """The batch, from the run."""
        return self._batches.take(self._number)

    def __reduce__(self) -> tuple[type[_BatchElsewhere], tuple[Plan, Item]]:
        return _BatchElsewhere, (self._batches.run.plan, self._batches.item(self._number))


class _BatchElsewhere(WholeBatch):
    """The same batch in a process that has only the plan: torch's loader with workers of its own."""

    def __init__(self, plan: Plan, item: Item) -> None:
        self._plan, self._item = plan, item

    def take(self) -> dict[str, Any]:
        row, rank, world_size, part, num_parts, _ = self._item
        return as_tensors(self._plan.read_at(row, rank, world_size, part=part, num_parts=num_parts))


def keep_batch(batch: Any) -> Any:
    """The `collate_fn` of a plan's loader: what the run gives is a batch already."""
    return batch


def shown_arguments(torchs: dict[str, Any], device: Any) -> dict[str, Any]:
    """Torch's arguments as a plan's loader shows them: a loader built from them gets the run's own batches."""
    shown = {
        "num_workers": 0,
        "timeout": 0,
        "prefetch_factor": None,
        "persistent_workers": False,
        "collate_fn": keep_batch,
    }
    return torchs | shown | ({} if device is None else {"pin_memory": False})


def find_run(given: Mapping[str, Any]) -> PlanRun | None:
    """The run of the loader whose attributes a framework builds this one from."""
    for sampler in (given["sampler"], getattr(given["batch_sampler"], "sampler", None)):
        if isinstance(sampler, PlanSampler):
            return sampler.run
    return None


def find_plan(dataset: Any, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> PlanSource | None:
    """The plan that a loader runs: it was given one, or a Penstock dataset and nothing that asks for Python per sample.

    Without a generator the seed is 0 on all ranks, as `DistributedSampler`'s is: each rank often seeds torch in
    its own way, and would then shuffle in its own way.

    Raises:
        ValueError: with a plan, an argument asks for what the plan decides; or there is no such world size; or a
            framework builds this loader from another's attributes, with a sampler that knows nothing of its plan.
    """
    if isinstance(given["batch_sampler"], PlanBatchSampler):
        raise ValueError(
            f"A framework puts a {type(given['batch_sampler'].sampler).__name__} into the loader of a plan; "
            "Lightning does so for overfit_batches. Leave that out, and give a plan over a few samples, without "
            "shuffle: ds.take(range(64)).batch(8)."
        )
    if given["world_size"] is not None:
        check_rank(0, given["world_size"])
    if isinstance(dataset, Plan):
        check_plan_arguments(given, defaults)
        return PlanSource(dataset=dataset)
    if not isinstance(dataset, Dataset) or _needs_python(given):
        return None
    seed, generator = None, given["generator"]
    if given["shuffle"]:
        seed = 0 if generator is None else generator.initial_seed()
    return PlanSource(
        dataset=dataset,
        batch_size=given["batch_size"],
        seed=seed,
        drop_last=given["drop_last"],
        world_size=given["world_size"],
    )


def _needs_python(given: Mapping[str, Any]) -> bool:
    """Whether torch's arguments ask for something that only Python per sample can do."""
    names = ("sampler", "batch_sampler", "collate_fn", "worker_init_fn", "multiprocessing_context")
    return any(given[name] is not None for name in names) or given["batch_size"] is None

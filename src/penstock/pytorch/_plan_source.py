"""Which plan a loader runs, and what frameworks see of it.

Frameworks that train on several processes put a `DistributedSampler` into every loader that has none, or
wrap loaders so that each process gets a share. A plan gives each rank its share already, so its loader says
that this is done: its sampler is a `DistributedSampler`, and Accelerate finds it prepared.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DistributedSampler

from penstock.plan import Dataset, Plan
from penstock.pytorch._arguments import check_plan_arguments
from penstock.pytorch._ranks import check_rank, find_rank


class PlanSampler(DistributedSampler[int]):
    """Stands where frameworks look for a sampler: the order, and this rank's share of it, are the plan's.

    A loader that a framework rebuilds from another's attributes finds the plan here.
    """

    def __init__(self, source: PlanSource, batch_size: int) -> None:
        self.source, self.batch_size = source, batch_size
        self.shuffle = False  # Lightning reads it; what is to be shuffled the plan shuffles
        self._find_loader: Callable[[], Any] = _nothing

    def belong_to(self, loader: Any) -> None:
        """The loader whose epochs it counts."""
        self._find_loader = weakref.ref(loader)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __len__(self) -> int:
        loader = self._find_loader()
        return 0 if loader is None else len(loader) * self.batch_size

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, unless the run is in it."""
        loader = self._find_loader()
        if loader is not None:
            loader.set_epoch(epoch)

    def __reduce__(self) -> tuple[type[PlanSampler], tuple[PlanSource, int]]:
        return PlanSampler, (self.source, self.batch_size)


def _nothing() -> None:
    """A loader that is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSource:
    """What a loader's plan is made from: a plan, or a Penstock dataset with torch's arguments.

    A dataset gives each rank `batch_size` samples, so its plan depends on the number of ranks, which is often
    not known yet when the loader is made: the plan is made again when a loop begins.
    """

    dataset: Plan | Dataset
    batch_size: int = 1
    seed: int | None = None
    drop_last: bool = False
    world_size: int | None = None

    @property
    def is_fixed(self) -> bool:
        """Whether the plan is the same for any number of ranks."""
        return isinstance(self.dataset, Plan) or self.world_size is not None

    def make(self) -> Plan:
        """The plan, for as many ranks as there are now."""
        if isinstance(self.dataset, Plan):
            return self.dataset
        plan = self.dataset.as_plan() if self.seed is None else self.dataset.shuffle(seed=self.seed)
        world_size = find_rank()[1] if self.world_size is None else self.world_size
        return plan.batch(self.batch_size * world_size, tail="drop" if self.drop_last else "short")


def find_plan(dataset: Any, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> PlanSource | None:
    """The plan that a loader runs: it was given one, or a Penstock dataset and nothing that asks for Python per sample.

    Without a generator the seed is 0 on all ranks, as `DistributedSampler`'s is: each rank often seeds torch in
    its own way, and would then shuffle in its own way.

    Raises:
        ValueError: with a plan, an argument asks for what the plan decides; or there is no such world size.
    """
    if given["world_size"] is not None:
        check_rank(0, given["world_size"])
    for sampler in (given["sampler"], getattr(given["batch_sampler"], "sampler", None)):
        if isinstance(sampler, PlanSampler):
            return sampler.source
    if isinstance(dataset, Plan):
        check_plan_arguments(given, defaults)
        return PlanSource(dataset=dataset)
    if not isinstance(dataset, Dataset) or _needs_python(given):
        return None
    generator = given["generator"]
    return PlanSource(
        dataset=dataset,
        batch_size=given["batch_size"],
        seed=(0 if generator is None else generator.initial_seed()) if given["shuffle"] else None,
        drop_last=given["drop_last"],
        world_size=given["world_size"],
    )


def plan_attributes(source: PlanSource, micro_batch: int | None, world_size: int | None) -> dict[str, Any]:
    """What a plan's loader shows as torch's attributes: as far as can be told now, rows per batch of this rank."""
    world_size = find_rank()[1] if world_size is None else world_size
    size = micro_batch or max(1, source.make().global_size // world_size)
    return {"batch_size": size, "sampler": PlanSampler(source, size)}


def _needs_python(given: Mapping[str, Any]) -> bool:
    """Whether torch's arguments ask for something that only Python per sample can do."""
    names = ("sampler", "batch_sampler", "collate_fn", "worker_init_fn", "multiprocessing_context")
    return any(given[name] is not None for name in names) or given["batch_size"] is None

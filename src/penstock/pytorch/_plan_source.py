"""How a plan wears torch's loader: which of torch's arguments mean something, and what frameworks see.

Frameworks that train on several processes put a `DistributedSampler` into every loader that has none, or
wrap loaders so that each process gets a share. A plan gives each rank its share already, so its loader says
that this is done: its sampler is a `DistributedSampler`, and Accelerate finds it prepared.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DistributedSampler

from penstock.plan import Dataset, Plan
from penstock.pytorch._ranks import check_rank, find_rank

_INSTEAD = {
    "batch_size": "the plan says it: plan.batch({value})",
    "shuffle": "the plan says it: ds.shuffle(seed=7).batch(32)",
    "sampler": "the plan is the order; use ds.take(indices) for a choice",
    "batch_sampler": "the plan says what a batch is",
    "collate_fn": "put it into the plan: plan.map(function, batched=True)",
    "drop_last": "the plan says it: plan.batch(32, tail='drop')",
    "timeout": "it is for torch datasets",
    "worker_init_fn": "workers of a plan have no state; give mapped functions (row, rng)",
    "multiprocessing_context": "use start_method",
    "generator": "the plan has its seed: ds.shuffle(seed=7)",
}
_MEANS_NOTHING: dict[str, tuple[Any, ...]] = {
    "batch_size": (1,),
    "shuffle": (False,),
    "drop_last": (False,),
    "timeout": (0,),
}


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


def check_plan_arguments(arguments: dict[str, Any]) -> None:
    """Refuse arguments of torch that a plan has its own way for."""
    for name, instead in _INSTEAD.items():
        value = arguments[name]
        if value is not None and value not in _MEANS_NOTHING.get(name, ()):
            raise ValueError(f"{name}={value!r} with a plan: {instead.format(value=value)}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSource:
    """What a loader's plan is made of: a plan, or a Penstock dataset with torch's arguments.

    The latter gives each rank `batch_size` samples, so it depends on the number of ranks, which is often
    not known yet when the loader is made: it is asked again when a loop begins.
    """

    dataset: Plan | Dataset
    batch_size: int = 1
    seed: int | None = None
    drop_last: bool = False
    world_size: int | None = None

    @property
    def is_fixed(self) -> bool:
        """Whether the number of ranks changes nothing about it."""
        return isinstance(self.dataset, Plan) or self.world_size is not None

    def make(self) -> Plan:
        """The plan, for as many ranks as there are now."""
        if isinstance(self.dataset, Plan):
            return self.dataset
        plan = self.dataset.as_plan() if self.seed is None else self.dataset.shuffle(seed=self.seed)
        world_size = find_rank()[1] if self.world_size is None else self.world_size
        return plan.batch(self.batch_size * world_size, tail="drop" if self.drop_last else "short")


def find_plan(dataset: Any, arguments: dict[str, Any], world_size: int | None) -> PlanSource | None:
    """The plan that a loader of this runs: it is one, or a Penstock dataset and nothing asks for Python per sample.

    Without a generator the seed is 0 on all ranks, as `DistributedSampler`'s is: ranks often seed torch
    each in their own way, and would then shuffle each in their own way.
    """
    if world_size is not None:
        check_rank(0, world_size)
    for sampler in (arguments["sampler"], getattr(arguments["batch_sampler"], "sampler", None)):
        if isinstance(sampler, PlanSampler):
            return sampler.source
    if isinstance(dataset, Plan):
        check_plan_arguments(arguments)
        return PlanSource(dataset=dataset)
    needs_torch = ("sampler", "batch_sampler", "collate_fn", "worker_init_fn", "multiprocessing_context")
    if not isinstance(dataset, Dataset) or any(arguments[name] is not None for name in needs_torch):
        return None
    if arguments["batch_size"] is None or arguments["timeout"]:
        return None
    generator = arguments["generator"]
    return PlanSource(
        dataset=dataset,
        batch_size=arguments["batch_size"],
        seed=(0 if generator is None else generator.initial_seed()) if arguments["shuffle"] else None,
        drop_last=arguments["drop_last"],
        world_size=world_size,
    )


def plan_attributes(source: PlanSource, micro_batch: int | None, world_size: int | None) -> dict[str, Any]:
    """What a plan's loader shows as torch's attributes: as far as can be told now, rows per batch of this rank."""
    world_size = find_rank()[1] if world_size is None else world_size
    size = micro_batch or max(1, source.make().global_size // world_size)
    return {"batch_size": size, "sampler": PlanSampler(source, size)}

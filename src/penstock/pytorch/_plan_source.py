"""What a loader's plan is made from: it is given one, or makes one of a Penstock dataset and torch's arguments."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.plan import Dataset, Plan
from penstock.pytorch._ranks import find_rank


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
        plan = self.dataset.as_plan() if self.seed is None else self._shuffled(self.dataset, self.seed)
        world_size = find_rank()[1] if self.world_size is None else self.world_size
        return plan.batch(self.batch_size * world_size, tail="drop" if self.drop_last else "short")

    def _shuffled(self, dataset: Dataset, seed: int) -> Plan:
        """Everything permuted, as torch does it, unless small samples would have to be read one by one from a disk."""
        return dataset.shuffle(seed=seed, mode="full" if dataset.is_cheap_at_random else "windows")

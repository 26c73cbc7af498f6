"""Running work ahead of the training loop: engines, recycled memory, delivery in order, state.

An engine computes work item k, whatever the work is; nothing here knows torch.
May import: `plan` and the lines under it. Imported by: `pytorch`.
"""

from penstock.loader._cpus import default_workers, usable_cpus
from penstock.loader._cursor import Cursor
from penstock.loader._engine import Engine, Result, StartMethod, make_engine
from penstock.loader._layout import Batch
from penstock.loader._memory import Arena
from penstock.loader._pipeline import InFlight, Pipeline
from penstock.loader._statistics import LoaderStatistics, count_computed, count_handed_over
from penstock.loader._work import Item, PlanWork, Stretch, Work, has_batches, plan_items, steps_per_stretch

__all__ = [
    "Arena",
    "Batch",
    "Cursor",
    "Engine",
    "InFlight",
    "Item",
    "LoaderStatistics",
    "Pipeline",
    "PlanWork",
    "Result",
    "StartMethod",
    "Stretch",
    "Work",
    "count_computed",
    "count_handed_over",
    "default_workers",
    "has_batches",
    "make_engine",
    "plan_items",
    "steps_per_stretch",
    "usable_cpus",
]

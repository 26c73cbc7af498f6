"""Compute batches ahead of the training loop: engines, recycled memory, delivery in order, state.

    Cursor       where the run is: an absolute row
      | plan_items
    Pipeline     submits items, a few ahead; takes results, in order
      | item                                 ^ batch: arrays on a leased slot
    Engine       InlineEngine | ThreadEngine | ProcessEngine, which feeds a `workers.Crew`
                 | ElasticEngine, which starts as the first and may become one of the others
      | item, slot                           ^ layout: where each array lies in the slot
    Work         computes the item into the slot: PlanWork here, torch datasets in `pytorch`

A slot returns to its pool when the last array or tensor on it dies. When a worker process dies, its items
go to its replacement: they are pure functions, so it does no harm to compute one twice.
An engine computes any work; nothing here knows torch.

May import: `errors`, `filesystem`, `machine`, `plan`, `remote`, `report`, `schema`, `shapes`, `workers`. Imported
by: `integrations`, `pytorch`, `service`, `tuning`. Holds state: the thread engines of this process, weakly, to close
them at exit.
"""

from penstock.loader._ahead import FetchAhead
from penstock.loader._engine import Engine, Result, Wait, WaitedTooLong, WorkerKind
from penstock.loader._engines import make_engine
from penstock.loader._layout import Batch, BatchLayout, PlacedArray, PlacedRagged, place_arrays
from penstock.loader._memory import Arena, SlotPool, private_slot
from penstock.loader._pipeline import (
    LoaderStatistics,
    Pipeline,
    count_computed,
    count_handed_over,
)
from penstock.loader._plan_work import (
    Bundle,
    Cursor,
    Item,
    PlanWork,
    has_batches,
    plan_items,
    steps_per_bundle,
    warm_up_for,
)
from penstock.loader._processes import ProcessEngine, start_early
from penstock.loader._settings_file import FILE_NAME, SettingsFile, format_settings, read_settings, simplify

__all__ = [
    "FILE_NAME",
    "Arena",
    "Batch",
    "BatchLayout",
    "Bundle",
    "Cursor",
    "Engine",
    "FetchAhead",
    "Item",
    "LoaderStatistics",
    "Pipeline",
    "PlacedArray",
    "PlacedRagged",
    "PlanWork",
    "ProcessEngine",
    "Result",
    "SettingsFile",
    "SlotPool",
    "Wait",
    "WaitedTooLong",
    "WorkerKind",
    "count_computed",
    "count_handed_over",
    "format_settings",
    "has_batches",
    "make_engine",
    "place_arrays",
    "plan_items",
    "private_slot",
    "read_settings",
    "simplify",
    "start_early",
    "steps_per_bundle",
    "warm_up_for",
]

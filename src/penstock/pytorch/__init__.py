"""`penstock.DataLoader`: batches as tensors, ahead of the training loop.

    DataLoader(plan)             PlanRun:  loader.Pipeline -> arrays in a slot -> tensors of the same memory --------+
                                                                                                                     |
    DataLoader(torch_dataset)    TorchRun: sampler -> Indices -> InlineBatches, or WorkerBatches:                    |
                                   TorchItem => worker: TorchWork fetches and collates into the slot                 |
                                   TorchAnswer <= worker, unpacked over the leased slot -----------------------------+
                                                                                                                     |
    with pin_memory or device    PinningFeed (a thread copies) -> DeviceFeed (a side stream copies) <----------------+
                                   -> the `for` loop, which counts what it was handed: the state

    _dataloader, _arguments     the loader itself: sorts arguments, chooses the run
    _plan_*                     the plan run: where it stands, its workers, what frameworks see of it
    _torch_*                    the torch run: how an epoch begins, loops, workers, transport, state
    _feed, _device, _batches    from host batches to pinned memory and the device
    _stream                     a torch dataset over raw files, for this loader or torch's
    _online, _live_tuning       what num_workers="auto" measures and decides

Both runs offer the same: iterate, length, state, epoch, statistics, close. Servers, streams and tuning are imported
when they are used.

May import: `errors`, `loader`, `machine`, `plan`, `schema`, `service`, `shapes`, `sources`, `workers`. Imported by:
`doctor`, `integrations`, `tuning`. Holds state: which warnings were given already.
"""

try:
    import torch as _torch  # noqa: F401 - asked for here, so that its absence is explained in one place
except ImportError as error:
    from penstock.errors import MissingExtra

    raise MissingExtra(
        "penstock.DataLoader and penstock.stream need PyTorch: pip install 'penstock-data[torch]'"
    ) from error

from penstock.pytorch._dataloader import DataLoader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from penstock.pytorch._online import Bounds, Decision, OnlineTuner, Setting, Stretch
    from penstock.pytorch._stream import Stream, stream
else:  # a loader of plans or torch datasets needs none of this, nor the rooms behind it

    def __getattr__(name: str):
        import importlib

        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = "_stream" if name in ("Stream", "stream") else "_online"
        return getattr(importlib.import_module(f"{__name__}.{module}"), name)


__all__ = [
    "Bounds",
    "DataLoader",
    "Decision",
    "OnlineTuner",
    "Setting",
    "Stream",
    "Stretch",
    "stream",
]

"""Warnings, each given once per process and shown at the user's line; and hints, which only the log gets."""

import logging
import sys
import warnings
from pathlib import Path

import torch

from penstock.errors import PenstockError
from penstock.machine import cpu_shortfall, usable_cpus
from penstock.plan import Plan
from penstock.pytorch._ranks import find_rank

_log = logging.getLogger(__name__)
_PACKAGE = str(Path(__file__).parent)
_LIGHTNING_WRAPPERS = ("lightning.fabric.utilities.data", "lightning_fabric.utilities.data")
_SLOW_SECONDS = 2.0
_FAST_MULTIPLE = 8
_said: set[str] = set()


def warn_once(key: str, message: str) -> None:
    """Warn, the first time in this process that this key comes up."""
    if key not in _said:
        _said.add(key)
        torch_package = str(Path(torch.__file__).parent / "utils" / "data")
        _warn_outside((_PACKAGE, torch_package, *_loaded_wrappers()), message)


def warn_too_many_workers(num_workers: int) -> None:
    """More workers than processors slow each other, and the training loop, down."""
    cpus = usable_cpus()
    if num_workers > cpus:
        better = f"{cpus - 1} or {cpus}" if cpus > 1 else "1"
        warn_once(
            f"workers {num_workers}",
            f"This DataLoader will create {num_workers} worker processes in total, but this job may use only {cpus} "
            f"processor{'s' if cpus > 1 else ''}. They would compete with each other and with the training loop: "
            f"num_workers={better} is likely to be faster, unless workers mostly wait for a network.",
        )


def warn_of_lost_cpus() -> None:
    """A rank whose processors were lost between `sbatch` and `srun` trains slowly, and nothing else says why."""
    if said := cpu_shortfall():
        warn_once("lost processors", said)


def log_odd_batch_size(batch_size: int) -> None:
    """Give a hint in the log only, since no program need stop for it.

    Matrix units of accelerators work on 8 rows at a time; small batches do not fill them anyway.
    """
    if batch_size > _FAST_MULTIPLE and batch_size % _FAST_MULTIPLE:
        lower = batch_size // _FAST_MULTIPLE * _FAST_MULTIPLE
        _log.info(
            "batch_size=%d is not a multiple of %d, the size that matrix units work in: %d or %d costs about the same "
            "time or less per sample.",
            batch_size,
            _FAST_MULTIPLE,
            lower,
            lower + _FAST_MULTIPLE,
        )


def log_runs(plan: Plan, rank: int | None) -> None:
    """A hint, once and on the first rank, that a plan's shuffle leaves together what is stored together."""
    if (find_rank()[0] if rank is None else rank) != 0:
        return
    try:
        found = [mixing for mixing in plan.mixing() if mixing.is_far]
    except (PenstockError, OSError):  # the first batch that needs what is damaged says so
        return
    for mixing in found:
        message = (
            f"{mixing}. Prepare the data with shuffle=0 (--shuffle 0), mix more at a time with shuffle(seed, group=…), "
            "or, where random reads are cheap, use shuffle(seed, mode='full')."
        )
        if message not in _said:
            _said.add(message)
            _log.warning("%s", message)


def warn_slow_pickling(seconds: float, name: str) -> None:
    """A dataset of very many objects, of which each worker gets its own copies."""
    if seconds > _SLOW_SECONDS:
        warn_once(
            f"pickle {name}",
            f"Sending {name} to the workers took {seconds:.1f} s. Arrays, tensors and memory maps are not copied for "
            "each worker, Python objects are: keep the data in a few arrays, or in files that are opened in the "
            "worker (penstock.open), or use multiprocessing_context='fork', which copies nothing.",
        )


def warn_repeating_workers(name: str, workers: tuple[int, int]) -> None:
    """Each worker reads all of an iterable dataset."""
    warn_once(
        f"repeats {name}",
        f"Workers {workers[0]} and {workers[1]} began with the same batches, and {name} did not ask which worker it "
        "is in: every sample will come once per worker. Have its __iter__ take a share by "
        "torch.utils.data.get_worker_info().id and .num_workers, or use penstock.stream, or num_workers=1.",
    )


def warn_reading_again(name: str, num_batches: int) -> None:
    """An iterable dataset without a state is resumed by reading it again."""
    warn_once(
        f"again {name}",
        f"{name} has no state_dict(): to resume, it is read again from the beginning, and "
        f"{num_batches:,} batches are skipped. That is exact only if it yields the same samples again. Give it, "
        "or the iterator that its __iter__ returns, state_dict() and load_state_dict(); penstock.stream has them.",
    )


def warn_of_second_split() -> None:
    """Accelerate splits iterable datasets over processes, even those that split themselves."""
    state = sys.modules.get("accelerate.state")
    if state is not None and state.is_initialized() and state.AcceleratorState().num_processes > 1:
        warn_once(
            "second split",
            "This stream gives each rank its share of the files, and the loader that accelerator.prepare or Trainer "
            "made splits it again: records would be lost. Use penstock.DataLoader, which Accelerate leaves alone, or "
            "leave the splitting to Accelerate: stream(..., rank=0, world_size=1).",
        )


def warn_of_separate_epochs() -> None:
    """Without /proc, workers that are not forked cannot be told which epoch is next."""
    warn_once(
        "separate epochs",
        "/proc is not mounted, so workers that are not forked count the epochs of this stream on their own, and each "
        "loop would begin the same one. Call stream.set_epoch(epoch) before each loop, without persistent_workers, or "
        "use multiprocessing_context='fork'.",
    )


def _loaded_wrappers() -> list[str]:
    """Lightning's file whose functions stand around each loader's `__init__` while it asks for loaders."""
    loaded = (sys.modules.get(name) for name in _LIGHTNING_WRAPPERS)
    return [module.__file__ for module in loaded if module is not None and module.__file__]


def _warn_outside(files: tuple[str, ...], message: str) -> None:
    """Warn at the innermost line outside these files and folders: the user's."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(files):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)

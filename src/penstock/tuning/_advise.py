"""Where data should be and how to read it, from sizes, limits and the kind of storage.

facts      bytes of the data, memory of this job, processors, storage, scratch; with `measure`, a few reads
sentences  what to do, why, and what the first epoch will cost
"""

import dataclasses
import itertools
import math
import os
import random
import time
import timeit
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from penstock.dataset import Scratch, StorageKind, find_scratch, foreign_files, storage_kind
from penstock.errors import counted
from penstock.filesystem import open_regular
from penstock.machine import cpu_shortfall, default_workers, job_memory, ranks_on_node, usable_cpus
from penstock.plan import Dataset, Plan, open_dataset
from penstock.shards import ShardFolder

Placement = Literal["RAM", "memory map", "stage", "stream", "in place"]

_WORKER_BYTES = {"thread": 50e6, "process": 400e6}
"""What a worker takes besides the data: buffers, and the interpreter of a process."""
_TRAINER_BYTES = 2e9
"""What the training process takes by default: libraries, pinned buffers, the model's copy on the host."""
_PAGE = 4096
_READ_AHEAD = 128 << 10
"""Bytes that the kernel reads at a page fault when reading in order; a random fault reads little more than a page."""
_TYPICAL: dict[StorageKind, tuple[float, float]] = {
    "memory": (5e9, 1e-6),
    "ssd": (5e8, 1e-4),
    "rotating": (1.2e8, 8e-3),
    "network": (2e8, 1e-3),
    "unknown": (2e8, 1e-3),
}
"""(bytes per second in order, seconds of a random read): assumed if nothing was measured."""
_READS, _SEQUENTIAL_BYTES = 24, 32 << 20
_SLOW_SHARE = 0.25
"""How much a full shuffle may add to an epoch's reading time before windows are advised."""


class Speed(NamedTuple):
    """The speed of a storage."""

    bytes_per_second: float
    random_seconds: float
    is_measured: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What to do with a dataset on this machine, and the facts behind it."""

    path: str
    data_bytes: int
    num_samples: int
    memory_bytes: int | None
    """Memory that this job may use: the machine's, the control group's, Slurm's."""
    reserved_bytes: int
    """How much of it is for this node's training processes and their workers."""
    num_ranks: int
    """Training processes that share this memory, and the cached data."""
    num_cpus: int
    cpu_shortfall: str | None
    """Why this job may use fewer processors than it asked for, and what to do; None if it may use them all."""
    num_workers: int
    storage: StorageKind
    speed: Speed
    scratch: Scratch | None
    placement: Placement
    shuffle: Literal["full", "windows"]
    batch_seconds: float | None = None
    """Time to compute a batch, mapped functions included; None if not measured."""
    map_seconds: float | None = None
    """How much of it is spent in mapped functions."""

    @property
    def fits(self) -> bool | None:
        """Whether the data fits in memory besides everything else; None if the memory is unknown."""
        return None if self.memory_bytes is None else self.data_bytes <= self.memory_bytes - self.reserved_bytes

    @property
    def first_epoch_seconds(self) -> float:
        """Time to read everything once, more or less in order."""
        return self.data_bytes / self.speed.bytes_per_second

    @property
    def page_faults(self) -> int:
        """Page faults of the first epoch, with a map that is read in order."""
        return -(-self.data_bytes // _READ_AHEAD)

    def sentences(self) -> Iterator[str]:
        """The advice, in words."""
        yield self._memory_sentence()
        yield self._placement_sentence()
        yield self._shuffle_sentence()
        how = "measured" if self.speed.is_measured else "assumed for such storage; `--measure` reads a little"
        later = "Later ones find it in memory." if self.fits else "So do later ones."
        yield (
            f"The first epoch reads {_gigabytes(self.data_bytes)} from storage ({self.storage}) at "
            f"{self.speed.bytes_per_second / 1e6:,.0f} MB/s ({how}): {_minutes(self.first_epoch_seconds)}, in about "
            f"{counted(self.page_faults, 'page fault')}. {later}"
        )
        yield (
            f"{counted(self.num_cpus, 'processor')} for this job: {counted(self.num_workers, 'worker')} to start with."
        )
        if self.cpu_shortfall is not None:
            yield self.cpu_shortfall
        if self.map_seconds is not None and self.batch_seconds:
            yield self._map_sentence(self.map_seconds, self.batch_seconds)

    def __str__(self) -> str:
        return "\n  ".join([f"{self.path}: {counted(self.num_samples, 'sample')}", *self.sentences()])

    def to_json(self) -> dict[str, Any]:
        scratch = None if self.scratch is None else {"variable": self.scratch.variable, "path": str(self.scratch.path)}
        names = (*(field.name for field in dataclasses.fields(self)), "fits", "first_epoch_seconds", "page_faults")
        plain = {name: getattr(self, name) for name in names}
        return plain | {"speed": self.speed._asdict(), "scratch": scratch, "sentences": list(self.sentences())}

    def _memory_sentence(self) -> str:
        if self.memory_bytes is None:
            return f"{_gigabytes(self.data_bytes)} of data; how much memory this job may use is unknown here."
        left = max(0, self.memory_bytes - self.reserved_bytes)
        verdict = "fits" if self.fits else "does not fit"
        return (
            f"{_gigabytes(self.data_bytes)} of data {verdict} in the {_gigabytes(left)} that remain of the "
            f"{_gigabytes(self.memory_bytes)} this job may use, after {_gigabytes(self.reserved_bytes)} for training "
            f"and workers{f' of {self.num_ranks} ranks' if self.num_ranks > 1 else ''}."
        )

    def _placement_sentence(self) -> str:
        if self.placement == "stage":
            assert self.scratch is not None
            return (
                f"It is on a network: copy it once to this node's own storage, which has room for it: penstock stage "
                f"{self.path} ${self.scratch.variable}"
            )
        if self.placement == "stream":
            kept = "and the page cache keeps it" if self.fits else "in storage windows, from the network in every epoch"
            return (
                "It is on a network, and the environment names no folder on this node with room for it: penstock.open "
                f"reads it as needed (io='pread'), {kept}."
            )
        if self.placement == "in place":
            where = (
                "It is on a network: copy it to this node's own storage, if it fits"
                if self.storage == "network"
                else "Leave it where it is"
            )
            return (
                f"{where}. What was read stays in the page cache. Its files have no checksums, so damage is not "
                "noticed; `penstock prepare` makes a checked copy."
            )
        if self.placement == "RAM":
            return "It is already in memory, where every worker process would need a copy: use threads."
        if self.fits:
            return "Map it (penstock.open does): pages are loaded when read, stay, and are shared by all workers."
        return "Map it (penstock.open does): the kernel keeps as much as fits; a copy in RAM would not fit at all."

    def _shuffle_sentence(self) -> str:
        cost = self.num_samples * self.speed.random_seconds
        if self.shuffle == "full":
            why = "all of it stays in memory" if self.fits else "random reads are cheap on this storage"
            return f"shuffle(mode='full') is fine: {why}."
        return (
            f"shuffle(mode='windows'): a full shuffle would read {self.num_samples:,} samples one by one, "
            f"{_minutes(cost)} per epoch, compared with {_minutes(self.first_epoch_seconds)} in order."
        )

    def _map_sentence(self, mapped: float, whole: float) -> str:
        share = mapped / max(whole, 1e-9)
        if share < 0.5:
            return (
                f"Mapped functions take {100 * share:.0f} % of a batch's {1000 * whole:.1f} ms: leave them in the plan."
            )
        return (
            f"Mapped functions take {1000 * mapped:.1f} of a batch's {1000 * whole:.1f} ms, in every epoch: do what "
            "needs no random numbers once, in penstock.prepare(transform=...)."
        )


def advise(
    data: str | os.PathLike[str] | Dataset | Plan, *, measure: bool = False, reserve_bytes: float | None = None
) -> Advice:
    """How to place and read a dataset or a plan on this machine, within what this job may use.

    Args:
        data: A dataset's path, a dataset, or a plan.
        measure: Read a little from storage, and compute a few batches of a plan: some seconds at most.
        reserve_bytes: Memory that each training process needs for itself; 2 GB by default.

    Raises:
        ValueError: `reserve_bytes` is not an amount of memory.
    """
    reserve = _TRAINER_BYTES if reserve_bytes is None else reserve_bytes
    if not 0 <= reserve < math.inf:
        raise ValueError(f"reserve_bytes={reserve_bytes}; expected 0 or more.")
    dataset, plan = _parts(data)
    foreign = foreign_files(dataset.storage)
    path = foreign[0] if foreign else Path(dataset.path)
    is_file = path.exists()
    kind: Literal["thread", "process"] = "process" if plan is not None and plan.runs_python else "thread"
    workers, data_bytes, num_ranks = default_workers(kind), dataset.storage.num_bytes, ranks_on_node()
    reserved = num_ranks * int(reserve + workers * _WORKER_BYTES[kind])
    storage = storage_kind(path) if is_file else "memory"
    largest = _largest_file(dataset) if measure and is_file else None
    speed = Speed(*_TYPICAL[storage], is_measured=False) if largest is None else measure_speed(largest)
    memory = job_memory()
    scratch = find_scratch(data_bytes) if storage == "network" else None
    # Maps are for local files: a page that a server cannot deliver is a signal that kills the process.
    elsewhere: Placement = "memory map" if storage != "network" else "stream" if scratch is None else "stage"
    # A full shuffle where samples come from memory, or where reading them one by one adds little.
    fits = memory is not None and data_bytes <= memory - reserved
    adds_little = len(dataset) * speed.random_seconds <= _SLOW_SHARE * data_bytes / speed.bytes_per_second
    batch_seconds, map_seconds = _measure_maps(plan) if measure and plan is not None else (None, None)
    return Advice(
        path=dataset.path,
        data_bytes=data_bytes,
        num_samples=len(dataset),
        memory_bytes=memory,
        reserved_bytes=reserved,
        num_ranks=num_ranks,
        num_cpus=usable_cpus(),
        cpu_shortfall=cpu_shortfall(),
        num_workers=workers,
        storage=storage,
        speed=speed,
        scratch=scratch,
        placement="in place" if foreign else elsewhere if is_file else "RAM",
        shuffle="full" if fits or adds_little else "windows",
        batch_seconds=batch_seconds,
        map_seconds=map_seconds,
    )


def _largest_file(dataset: Dataset) -> Path | None:
    """The largest file of the data; None if there is no data."""
    if foreign := foreign_files(dataset.storage):
        return max((path.resolve() for path in foreign if path.exists()), key=lambda path: path.stat().st_size)
    if not isinstance(dataset.storage, ShardFolder):
        return Path(dataset.path).resolve()
    shards = dataset.storage.manifest.shards
    largest = max(shards, key=lambda shard: shard.num_bytes, default=None)
    return None if largest is None else dataset.storage.path / largest.name


def measure_speed(path: Path) -> Speed:
    """A few random reads of a file, and a few megabytes in order, bypassing the page cache if possible."""
    descriptor = open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        draw = random.Random(0)  # noqa: S311 - not for secrets
        begin = time.perf_counter()
        for _ in range(_READS):
            os.pread(descriptor, _PAGE, draw.randrange(max(1, size - _PAGE)))
        latency = (time.perf_counter() - begin) / _READS
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        begin, num_read = time.perf_counter(), 0
        while num_read < min(size, _SEQUENTIAL_BYTES):
            num_read += len(os.pread(descriptor, 1 << 20, num_read)) or size
        return Speed(min(size, _SEQUENTIAL_BYTES) / max(time.perf_counter() - begin, 1e-9), latency, is_measured=True)
    finally:
        os.close(descriptor)


def _parts(data: Any) -> tuple[Dataset, Plan | None]:
    """The dataset, and the plan if one was given; for a mixture, the largest dataset."""
    if isinstance(data, Plan):
        return max(_datasets(data.source), key=lambda each: each.storage.num_bytes), data
    return (data if isinstance(data, Dataset) else open_dataset(data)), None


def _datasets(source: Any) -> list[Dataset]:
    """What a plan is built on: one dataset, or those of a mixture's parts."""
    if isinstance(source, Dataset):
        return [source]
    return [dataset for _, plan, _ in source.sources for dataset in _datasets(plan.source)]


def _measure_maps(plan: Plan) -> tuple[float | None, float | None]:
    """(seconds of a batch, how many of these in mapped functions), from the fastest of a few."""

    def fastest(plan: Plan) -> float:
        steps = itertools.count()
        return min(timeit.repeat(lambda: plan.read(next(steps)), number=1, repeat=4))

    if not plan.num_rows:
        return None, None
    whole = fastest(plan)
    return whole, max(0.0, whole - fastest(plan.without_maps())) if plan.functions else None


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e7 else f"{count / 1e6:,.2f} MB"


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:,.0f} min" if seconds >= 120 else f"{seconds:.1f} s"

"""The arguments of `DataLoader`: one table of the kind of data each is for, and what to use instead with the other.

A default is written once, in the signature of `DataLoader.__init__`, where editors show it; the checks read it there.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, SupportsIndex, get_args

import numpy as np

from penstock.errors import check_choice
from penstock.loader import SettingsFile, WorkerKind, read_settings, simplify
from penstock.machine import default_workers, usable_cpus
from penstock.plan import Plan
from penstock.workers import StartMethod

if TYPE_CHECKING:
    from penstock.service import Remote

Workers = Literal["auto", "inline", "thread", "process"]


class Argument(NamedTuple):
    """For which kind of data an argument means something. With the other kind it may only have its default."""

    is_torchs: bool
    with_plan: str | None = None
    """What to do instead with a plan; None if plans take it."""
    with_torch: str | None = None
    """What to do instead with a torch dataset; None if torch datasets take it."""
    also_allowed: tuple[Any, ...] = ()
    """Other values that ask for nothing and may be given."""


ARGUMENTS: Mapping[str, Argument] = {
    "batch_size": Argument(True, with_plan="the plan says it: plan.batch({value})"),
    "shuffle": Argument(True, with_plan="the plan says it: ds.shuffle(seed=7).batch(32)", also_allowed=(False,)),
    "sampler": Argument(True, with_plan="the plan is the order; use ds.take(indices) to choose samples"),
    "batch_sampler": Argument(True, with_plan="the plan says what a batch is"),
    "num_workers": Argument(True),
    "collate_fn": Argument(True, with_plan="put it into the plan: plan.map(function, batched=True)"),
    "pin_memory": Argument(True),
    "drop_last": Argument(True, with_plan="the plan says it: plan.batch(32, tail='drop')"),
    "timeout": Argument(True),
    "worker_init_fn": Argument(
        True, with_plan="workers of a plan have no state; let mapped functions take (row, rng) instead"
    ),
    "multiprocessing_context": Argument(True, with_plan="use start_method"),
    "generator": Argument(True, with_plan="the plan has its seed: ds.shuffle(seed=7)"),
    "prefetch_factor": Argument(True),
    "persistent_workers": Argument(True),
    "pin_memory_device": Argument(True),
    "in_order": Argument(True),
    "workers": Argument(
        False, with_torch="samples of a torch dataset are computed in processes", also_allowed=("process",)
    ),
    "prefetch": Argument(
        False, with_torch="with a torch dataset use prefetch_factor, per worker", also_allowed=("auto",)
    ),
    "mesh": Argument(False, with_torch="with a torch dataset use sampler=DistributedSampler(...) of mesh['dp']"),
    "rank": Argument(False, with_torch="with a torch dataset use sampler=DistributedSampler(...)"),
    "world_size": Argument(False, with_torch="with a torch dataset use sampler=DistributedSampler(...)"),
    "micro_batch": Argument(False, with_torch="with a torch dataset use batch_size"),
    "epochs": Argument(False, with_torch="with a torch dataset use a loop around the loop"),
    "steps": Argument(False, with_torch="with a torch dataset use itertools.islice(loader, {value})"),
    "start_method": Argument(False, with_torch="with a torch dataset use multiprocessing_context"),
    "drop_consumed": Argument(False, with_torch="with a torch dataset use one that drops what it has read"),
    "remote": Argument(
        False,
        with_torch="servers compute plans; samples of a torch dataset come from code and state of this process. "
        "Prepare the data (penstock.prepare) and put the transform into plan.map(...)",
    ),
    "local_workers": Argument(False, with_torch="with a torch dataset use num_workers"),
    "device": Argument(False),
    "on_device": Argument(False),
    "settings": Argument(False),
    "snapshot_every_n_steps": Argument(False),
}
"""All but `dataset`, in the order of the signature."""


def defaults_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The defaults of the table's arguments, from a function's signature."""
    parameters = inspect.signature(function).parameters
    return {name: parameters[name].default for name in ARGUMENTS}


def with_settings(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, with those of the settings file in place of defaults: an argument in the call wins.

    With `num_workers="auto"` in the call, the file says how many to begin with; with `num_workers=0` in the call, what
    the file says about workers is ignored. `measured_workers` is the file's number if it was measured on no more
    processors than there are here: it needs no warning.
    """
    path = given["settings"]
    found, num_cpus = SettingsFile({}, None) if path is None else read_settings(path)
    start = found.get("num_workers") if given["num_workers"] == "auto" else None
    is_measured_here = num_cpus is not None and num_cpus <= usable_cpus()
    taken = {name: value for name, value in found.items() if given[name] == defaults[name]}
    kept = simplify({"num_workers": given["num_workers"], **taken})
    taken = {name: value for name, value in taken.items() if name in kept}
    measured = found.get("num_workers") if is_measured_here else None
    return {**given, **taken, "start_workers": start, "measured_workers": measured}


def check_plan_arguments(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Refuse torch's arguments for what a plan decides.

    Raises:
        ValueError: one was given; the message says what to do instead.
    """
    for name, argument in ARGUMENTS.items():
        value = given[name]
        allowed = (None, defaults[name], *argument.also_allowed)
        if argument.with_plan is not None and not _is_one_of(value, allowed):
            raise ValueError(f"{name}={value!r} with a plan: {argument.with_plan.format(value=value)}.")


def check_torch_arguments(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Refuse the arguments of plans for a torch dataset.

    Raises:
        ValueError: one was given; the message says what to do instead.
    """
    num_workers = given["num_workers"]
    if num_workers not in (None, "auto") and not isinstance(num_workers, SupportsIndex):
        raise ValueError(f"num_workers={num_workers!r}; expected an integer of at least 0, or 'auto'.")
    if given["prefetch"] == "auto" and num_workers != "auto":
        raise ValueError("prefetch='auto' with a torch dataset goes with num_workers='auto'; or use prefetch_factor.")
    for name, argument in ARGUMENTS.items():
        value = given[name]
        if argument.with_torch is not None and not _is_one_of(value, (defaults[name], *argument.also_allowed)):
            raise ValueError(f"{name}={value!r} is for plans; {argument.with_torch.format(value=value)}.")


def torchs_arguments(given: Mapping[str, Any], *, is_plan: bool) -> dict[str, Any]:
    """What torch's `DataLoader.__init__` is given; for a plan, without what the plan decides."""
    taken = [name for name, argument in ARGUMENTS.items() if argument.is_torchs]
    return {name: given[name] for name in taken if not is_plan or ARGUMENTS[name].with_plan is None}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSettings:
    """How a plan is run; none of it changes a batch."""

    workers: Workers
    """"auto" takes threads for Penstock's own gathers and functions marked pure, processes for other Python code."""
    num_workers: int | Literal["auto"] | None
    """More workers produce more, and leave less of the processors to the training thread. None is "auto"."""
    start_workers: int | None
    """How many "auto" begins with; None is one less than the processors, and a few at most."""
    prefetch: int | Literal["auto"] | None
    """Batches computed ahead: hides uneven workers, costs memory. None: two per worker, more if they are small, and
    with num_workers="auto" found while it runs, as by "auto"."""
    in_order: bool
    """Hand batches over in order. Without it a slow one holds up nothing, and there is no state to save."""
    timeout: float
    """Seconds to wait for a batch before that is an error; 0 waits for ever."""
    micro_batch: int | None
    """Hand out a step's rows in pieces of this size, for accumulating gradients."""
    epochs: int | None
    """Epochs that one `for` loop runs through; None never stops."""
    steps: int | None
    """Steps of every `for` loop, in place of epochs: for frameworks that expect all epochs to have the same length."""
    drop_consumed: bool
    """Let data that was read leave the page cache: for data far larger than memory that no other run reads."""
    start_method: StartMethod
    """How worker processes start. "fork" takes lambdas along, but also every lock and thread of the trainer."""
    remote: Remote | None
    """Servers that compute the batches. Costs the network what the batches weigh; plain tokens are faster from here."""
    local_workers: int
    """Workers of this machine that take a share beside the servers, and all of it while none answers."""

    def __post_init__(self) -> None:
        check_choice("workers", self.workers, get_args(Workers))
        if self.num_workers not in ("auto", None) and (type(self.num_workers) is not int or self.num_workers < 0):
            raise ValueError(f"num_workers={self.num_workers!r}; expected an integer of at least 0, or 'auto'.")
        check_choice("start_method", self.start_method, get_args(StartMethod))
        if type(self.local_workers) is not int or self.local_workers < 0:
            raise ValueError(f"local_workers={self.local_workers!r}; expected an integer of at least 0.")
        if self.local_workers and self.remote is None:
            raise ValueError("local_workers= goes with remote=; without servers, use num_workers=.")
        if self.remote is not None and self.num_workers not in (None, 0, "auto"):
            raise ValueError(
                "num_workers= with remote=: servers have their own workers; for workers here use local_workers=."
            )
        if self.steps is not None and self.epochs != 1:
            raise ValueError(f"epochs={self.epochs!r} with steps={self.steps!r}: give one of them.")
        for name in ("prefetch", "micro_batch", "epochs", "steps", "start_workers"):
            value, least = getattr(self, name), 0 if name == "start_workers" else 1
            is_open = value is None or (name == "prefetch" and value == "auto")
            if not is_open and (type(value) is not int or value < least):
                raise ValueError(f"{name}={value!r}; expected an integer of at least {least}.")

    @classmethod
    def for_plan(cls, plan: Plan, given: Mapping[str, Any]) -> LoaderSettings:
        """The settings among the given arguments; `prefetch_factor`, per worker, counts unless `prefetch` is given.

        Raises:
            ValueError: one is not what it can be, alone or with the others.
        """
        given = {name: int(value) if isinstance(value, np.integer) else value for name, value in given.items()}
        if given["remote"] is not None:  # the service is loaded for nothing else
            from penstock.service import as_remote

            given["remote"] = as_remote(given["remote"])
        settings = cls(**{field.name: given[field.name] for field in dataclasses.fields(cls)})
        _, num_workers = settings.resolve(plan)
        if settings.timeout and not num_workers and settings.remote is None:
            raise ValueError(f"timeout={settings.timeout}: without workers a slow batch cannot be given up.")
        if given["prefetch_factor"] is None or settings.prefetch is not None or not num_workers:
            return settings
        return dataclasses.replace(settings, prefetch=given["prefetch_factor"] * num_workers)

    def resolve(self, plan: Plan) -> tuple[Literal["inline", "thread", "process", "remote"], int]:
        """(kind, number) of the workers for a plan; servers say how many they have when they are asked.

        Raises:
            ValueError: threads cannot run its functions.
        """
        if self.remote is not None:
            return "remote", self.local_workers
        return self.resolve_here(plan)

    def resolve_here(self, plan: Plan) -> tuple[WorkerKind, int]:
        """(kind, number) of the workers of this machine."""
        kind = self.workers
        if kind == "auto":
            kind = "process" if plan.runs_python else "thread"
        if self.num_workers == 0:
            kind = "inline"
        if kind == "inline":
            return "inline", 0
        if kind == "thread" and plan.needs_isolation:
            raise ValueError(
                "A mapped function takes only the row, so it may use global generators, which threads share. "
                "Use workers='process', let it take (row, rng), or mark it with @penstock.pure."
            )
        if self.tunes_workers:
            return kind, default_workers(kind) if self.start_workers is None else self.start_workers
        assert isinstance(self.num_workers, int)
        return kind, self.num_workers

    @property
    def tunes_workers(self) -> bool:
        """Whether the number of workers is found while they run."""
        return self.num_workers in (None, "auto")

    @property
    def tunes_prefetch(self) -> bool:
        """Whether the number of batches ahead is found while they are computed."""
        return self.prefetch == "auto" or (self.prefetch is None and self.tunes_workers)


def _is_one_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Whether a value is among these; None by identity, because comparing an array with it gives an array."""
    return any(value is each if each is None else value == each for each in allowed)

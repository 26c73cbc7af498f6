"""`penstock.tune`: looks at a job, asks the search which arm is next, and runs the turns.

A turn on a plan continues where the last one ended. If every turn started at the first batch, it would read what the
one before has brought into memory, and find storage faster than it will be in training.
"""

import contextlib
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import StateError
from penstock.loader import simplify
from penstock.machine import usable_cpus
from penstock.plan import Dataset, Plan
from penstock.tuning._arms import Look, Options, check_space, default_space, key_of, num_workers_of
from penstock.tuning._job import (
    EmptyLoader,
    MakeLoader,
    Measured,
    TrainingJob,
    TrainStep,
    close_loader,
    describe_exit,
    ignores_batch,
    take_turn,
    warm_up_steps,
)
from penstock.tuning._race import ROUNDS, Turn, leader_of, search
from penstock.tuning._tuned import TriedSetting, Tuned

_LOOK_TURNS = 2
"""The look lasts as long as this many turns: it must see the occasional slow batch."""

_FEW_WORKERS = 4
"""With up to this many workers, racers have all their turns."""

OnTurn = Callable[[int, Options, Measured | Exception], None]
"""(turns so far, arm, result or error)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneSettings:
    """How long the search may take."""

    steps: int
    """Steps per turn that count. More are more accurate, but take longer."""
    rounds: int
    """Turns per racer; one that drops out leaves its turns to the others."""
    seconds: float | None
    """No turn except the first starts after this time; None means no limit."""

    def __post_init__(self) -> None:
        if type(self.steps) is not int or self.steps < 2:
            raise ValueError(f"steps={self.steps!r}; expected an integer of at least 2.")
        if type(self.rounds) is not int or self.rounds < 2:
            raise ValueError(
                f"rounds={self.rounds!r}; expected an integer of at least 2: one says nothing about the noise."
            )
        if self.seconds is not None and not self.seconds > 0:
            raise ValueError(f"seconds={self.seconds!r}; expected more than 0.")


def tune(
    make_loader: MakeLoader,
    train_step: TrainStep,
    space: Mapping[str, Sequence[Any]] | None = None,
    *,
    steps: int = 15,
    rounds: int = ROUNDS,
    seconds: float | None = None,
    on_turn: OnTurn | None = None,
    name: str = "penstock.tune",
) -> Tuned:
    """Find the loader options with which training runs fastest, and the cheapest that are as good.

    Ctrl-C ends the search and returns what is known so far; `is_complete` says whether that happened.

    Args:
        make_loader: Called with options (`make_loader(num_workers=2, prefetch_factor=4)`); returns a fresh loader.
        train_step: Called with each batch. It should do what training does: the fastest loader is the one that lets
            this run fastest.
        space: Values to try for each option, the usual one first. If `batch_size` is among them, samples per second
            count.
        steps: Steps per turn that count.
        rounds: Turns for each of the three settings that race.
        seconds: No turn starts after this time.
        on_turn: Called after each turn.
        name: Name of the job.

    Raises:
        ValueError, TypeError: the job or the space is invalid, or its loader is empty.
        RuntimeError: no setting could be run; the cause is what the first one raised.
    """
    job = TrainingJob(make_loader=make_loader, train_step=train_step, name=name)
    space = default_space(usable_cpus()) if space is None else space
    check_space(space)
    tuner = _Tuner(job, dict(space), TuneSettings(steps=steps, rounds=rounds, seconds=seconds), on_turn)
    with contextlib.suppress(KeyboardInterrupt):
        tuner.run()
    return tuner.result()


class _Tuner:
    """Runs the turns of one search, and remembers them."""

    def __init__(self, job: TrainingJob, space: dict[str, Any], settings: TuneSettings, on_turn: OnTurn | None) -> None:
        self._job, self._space, self._settings, self._on_turn = job, space, settings, on_turn
        self._began = time.monotonic()
        self._turns: list[Turn] = []
        self._measured: dict[Any, list[Measured]] = {}
        self._arms: dict[Any, Options] = {}
        self._failed: dict[Any, Exception] = {}
        self._num_turns, self._num_steps = 0, 0
        self._reached: dict[str, Any] | None = None
        """Where the last turn on a plan ended."""
        self._best: Options | None = None
        self._is_complete = False

    def run(self) -> None:
        """Look, then take turns until the search is over or the time is up."""
        look, limit, rounds = self._look(), self._settings.seconds, self._settings.rounds
        asking = search(self._space, look, usable_cpus(), self._turns, rounds=rounds, cost=self._cost)
        try:
            arm = next(asking)
            while not self._turns or limit is None or time.monotonic() - self._began < limit:
                arm = asking.send(self._turn(arm))
        except StopIteration as end:
            self._best, self._is_complete = end.value, True

    def result(self) -> Tuned:
        """What is known now."""
        if not self._turns:
            if not self._failed:
                raise KeyboardInterrupt
            first = next(iter(self._failed.values()))
            raise RuntimeError(f"No setting of {self._job.name} could be run: {first}") from first
        best = leader_of(self._turns) if self._best is None else self._best
        tried = [
            TriedSetting.of(arm, self._measured.get(key, ()), self._failed.get(key), self._settings.steps)
            for key, arm in self._arms.items()
        ]
        return Tuned(
            name=self._job.name,
            tried=tuple(tried),
            turns=tuple(self._turns),
            best_options=dict(best),
            num_steps=self._num_steps,
            seconds=time.monotonic() - self._began,
            num_cpus=usable_cpus(),
            is_complete=self._is_complete,
            ignores_batch=ignores_batch(self._job.train_step),
        )

    def _look(self) -> Look | None:
        """Batches and steps one after the other, without workers; None if the loader cannot do that."""
        if "num_workers" not in self._space:
            return None
        first = {name: values[0] for name, values in self._space.items()}
        arm = simplify(first | {"num_workers": 0})
        found = self._measure(arm, num_steps=_LOOK_TURNS * self._settings.steps)
        if 0 in self._space["num_workers"]:
            self._remember(arm, found)
        if isinstance(found, Exception):
            return None
        produce_cpu, step_cpu = found.wait_cpu_seconds / found.num_steps, found.step_cpu_seconds / found.num_steps
        in_one_thread = max(1.0, produce_cpu / max(1e-9, found.loading_seconds))  # as a worker computes
        return Look([wait * in_one_thread for wait in found.waits], produce_cpu, found.steps, step_cpu)

    def _cost(self, arm: Options) -> float:
        """Cost of a turn, where 1 is one with the space's usual number of workers: each adds a step of warm-up."""
        steps = self._settings.steps
        counts = [count for count in self._space.get("num_workers", ()) if isinstance(count, int)]
        usual = max(_FEW_WORKERS, int(statistics.median(counts)) if counts else 0)
        return (steps + warm_up_steps(num_workers_of(arm))) / (steps + warm_up_steps(usual))

    def _turn(self, arm: Options) -> float | None:
        found = self._measure(arm)
        self._remember(arm, found)
        if isinstance(found, Exception):
            return None
        size = arm.get("batch_size")
        return found.rate * (size if isinstance(size, int) else 1)

    def _measure(self, arm: Options, num_steps: int | None = None) -> Measured | Exception:
        num_steps = num_steps or self._settings.steps
        warm_up = warm_up_steps(num_workers_of(arm))
        begun = time.perf_counter()
        loader: Any = None
        found: Measured | Exception
        try:
            with warnings.catch_warnings():  # about too many workers: they are intended
                warnings.simplefilter("ignore")
                loader = self._job.make_loader(**arm)
                self._resume(loader)
                found = take_turn(loader, self._job.train_step, num_steps=num_steps, warm_up=warm_up, begun=begun)
                self._remember_place(loader)
            self._num_steps += num_steps + warm_up
        except EmptyLoader:
            raise
        except Exception as error:  # noqa: BLE001 - a setting that cannot be run is a result
            found = error
        except SystemExit as error:
            found = RuntimeError(describe_exit(error)).with_traceback(error.__traceback__)
        finally:
            close_loader(loader)
        self._num_turns += 1
        if self._on_turn is not None:
            self._on_turn(self._num_turns, arm, found)
        return found

    def _resume(self, loader: Any) -> None:
        """Begin where the last turn ended, unless the job has another order now."""
        if self._reached is not None and _has_plan(loader):
            with contextlib.suppress(StateError):
                loader.load_state_dict(self._reached)

    def _remember_place(self, loader: Any) -> None:
        if _has_plan(loader):
            with contextlib.suppress(StateError):  # without an order there is no place
                self._reached = loader.state_dict()

    def _remember(self, arm: Options, found: Measured | Exception) -> None:
        key = key_of(arm)
        self._arms[key] = arm
        if isinstance(found, Exception):
            self._failed[key] = found
        else:
            self._measured.setdefault(key, []).append(found)


def _has_plan(loader: Any) -> bool:
    """Whether a place in the data means the same with all options."""
    return isinstance(getattr(loader, "dataset", None), Plan | Dataset) and hasattr(loader, "load_state_dict")

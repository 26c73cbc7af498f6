"""`penstock.tune`: looks at a job, asks the search which arm is next, runs the turns, and says what came of them.

A turn on a plan continues where the last one ended. If every turn started at the first batch, it would read what the
one before has brought into memory, and find storage faster than it will be in training.

The result is a table of settings: the best, the cheapest that is as good, and a settings file.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import StateError, counted
from penstock.filesystem import put_in_place
from penstock.loader import FILE_NAME, format_settings, simplify
from penstock.machine import usable_cpus
from penstock.plan import Dataset, Plan
from penstock.report import Arm, Fact, FigureTable, Gain, Headline, Page, format_bytes, format_number, format_seconds
from penstock.tuning._arms import Look, Options, check_space, default_space, key_of, name_of, num_workers_of
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
from penstock.tuning._race import ROUNDS, Turn, cheapest_within_noise, compare, leader_of, search

_HEADROOM = 1.25
"""More processors than the mean, so that a busy moment does not wait."""


class TriedSetting(NamedTuple):
    """One setting, and means over its turns; NaN if it failed."""

    options: Options
    num_turns: int
    rate: float
    """Steps per second."""
    loading_seconds: float
    """Mean wait for a batch."""
    training_seconds: float
    """Time of a turn's steps, waiting included."""
    waiting_share: float
    """Of that time."""
    cores: float
    memory_bytes: float | None
    error: float
    """Standard error of the rate over turns, relative to it."""
    failure: str

    @classmethod
    def of(cls, options: Options, turns: Sequence[Measured], failure: Exception | None, num_steps: int) -> TriedSetting:
        """Means over the turns of a setting; those of the look have more than `num_steps` steps."""
        if not turns:
            text = "" if failure is None else f"{type(failure).__name__}: {failure}".splitlines()[0]
            return cls(options, 0, math.nan, math.nan, math.nan, math.nan, math.nan, None, math.nan, text)
        rates = [turn.rate for turn in turns]
        memory = [turn.memory_bytes for turn in turns if turn.memory_bytes is not None]
        rate = statistics.fmean(rates)
        return cls(
            options,
            len(turns),
            rate,
            statistics.fmean(turn.loading_seconds for turn in turns),
            statistics.fmean(turn.seconds * num_steps / turn.num_steps for turn in turns),
            statistics.fmean(turn.loading_seconds * turn.num_steps / turn.seconds for turn in turns),
            statistics.fmean(turn.cores for turn in turns),
            max(memory, default=None),
            statistics.stdev(rates) / math.sqrt(len(rates)) / rate if len(rates) > 1 else math.nan,
            "",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The result of a search."""

    name: str
    tried: tuple[TriedSetting, ...]
    """In the order in which they were first tried."""
    turns: tuple[Turn, ...]
    best_options: Mapping[str, Any]
    num_steps: int
    """Training steps over all turns, warm-up included."""
    seconds: float
    num_cpus: int
    is_complete: bool
    """False if it was interrupted, or the time was up."""
    ignores_batch: bool = False
    """Whether the step never uses its batch."""

    @property
    def best(self) -> TriedSetting:
        """The fastest setting."""
        return self._find(self.best_options)

    @property
    def cheapest(self) -> TriedSetting:
        """The setting with the fewest workers, then the least memory, that is as fast, as far as can be told."""
        return self._find(cheapest_within_noise(self.turns, self.best_options))

    @property
    def options(self) -> dict[str, Any]:
        """What to give the loader: the cheapest within the noise of the best."""
        return dict(self.cheapest.options)

    @property
    def sbatch(self) -> str:
        """The line of a Slurm script that requests as many processors as that takes."""
        chosen = self.cheapest
        workers = num_workers_of(chosen.options)
        needed = math.ceil(_HEADROOM * chosen.cores)
        return f"#SBATCH --cpus-per-task={max(2 if workers else 1, min(needed, workers + 1))}"

    def table(self) -> FigureTable:
        """Settings, loading_time, training_time, processors, memory and error, the fastest first."""
        ranked, names = self._ranked(), list(dict.fromkeys(name for each in self.tried for name in each.options))
        header = (*names, "loading_time", "training_time", "steps/s", "cores", "memory", "error", "")
        shown = [{name: str(value) for name, value in each.options.items() if value is not None} for each in ranked]
        rows = [
            (*(cells.get(name, "–") for name in names), *self._figures(each))
            for cells, each in zip(shown, ranked, strict=True)
        ]
        return FigureTable(header=header, rows=tuple(rows))

    def to_toml(self, name: str = FILE_NAME) -> str:
        """The text of a settings file of that name."""
        chosen = self.cheapest
        rates = {"steps_per_second": round(chosen.rate, 3), "cores": round(chosen.cores, 2)}
        measured = {**rates, "processors": self.num_cpus}
        return format_settings(self.options, measured, command=f"penstock tune {self.name}", name=name)

    def write(self, path: str | os.PathLike[str] = FILE_NAME) -> Path:
        """Write the settings file; returns its path."""
        put_in_place(Path(path), self.to_toml(os.fspath(path)))
        return Path(path)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "best": _plain(self.best.options),
            "cheapest": _plain(self.options),
            "sbatch": self.sbatch,
            "is_complete": self.is_complete,
            "num_steps": self.num_steps,
            "seconds": self.seconds,
            "tried": [_tried_json(each) for each in self._ranked()],
            "notes": list(self.notes()),
        }

    def verdict(self) -> str:
        best, chosen = self.best, self.cheapest
        choice = f"{name_of(chosen.options)} gives {format_number(chosen.rate)} steps/s"
        if key_of(best.options) == key_of(chosen.options):
            num_measured = sum(each.num_turns > 0 for each in self.tried)
            return f"{choice}: the best of {counted(num_measured, 'setting')} that ran."
        lost = compare(self.turns, chosen.options, best.options)
        return (
            f"{choice}, which is within the noise of the best ({name_of(best.options)}: {lost.ratio:.2f} ± "
            f"{min(lost.width, 9.99):.2f} of its rate) and costs less."
        )

    def notes(self) -> Iterator[str]:
        if not self.is_complete:
            yield "The search was cut short: this is what is known so far."
        failed = [each for each in self.tried if each.failure]
        if failed:
            yield f"{counted(len(failed), 'setting')} failed; the table says how."
        if self.ignores_batch:
            yield (
                "train_step never uses its batch: what a real step does with it (copies to the device, varying "
                "lengths) was not measured."
            )
        share = self.best.waiting_share
        if share > 0.05:
            yield (
                f"With the best settings, training still waits for data {100 * share:.0f} % of the time: "
                "`penstock doctor`."
            )

    def page(self) -> Page:
        chosen = self.cheapest
        return Page(
            title=f"penstock tune · {self.name}",
            verdict=self.verdict(),
            tone="good" if self.is_complete else "plain",
            headlines=(
                Headline(value=f"{format_number(chosen.rate)}/s", label="steps", tone="good"),
                Headline(value=format_seconds(chosen.loading_seconds), label="wait for a batch"),
                Headline(value=f"{chosen.cores:.2f}", label="processors"),
                Headline(value=f"{self.num_steps:,}", label="steps used by the search"),
            ),
            arms=tuple(self._arm(each) for each in self._ranked() if not each.failure),
            machine=(Fact(name="processors", value=str(self.num_cpus)), Fact(name="Slurm", value=self.sbatch)),
            notes=(*self.notes(), *(f"{name_of(each.options)}: {each.failure}" for each in self.tried if each.failure)),
        )

    def __str__(self) -> str:
        return "\n".join([str(self.table()), "", self.verdict(), *self.notes(), self.sbatch])

    def _arm(self, each: TriedSetting) -> Arm:
        found = compare(self.turns, each.options, self.best_options)
        return Arm(
            name=name_of(each.options),
            gain=found.gain if found.num_rounds > 1 else Gain(ratio=each.rate / self.best.rate),
            steps_per_second=each.rate,
            wait_seconds=each.loading_seconds,
            step_seconds=(1 - each.waiting_share) / each.rate,
            cores=each.cores,
            is_baseline=key_of(each.options) == key_of(self.best_options),
            is_advised=key_of(each.options) == key_of(self.options),
        )

    def _figures(self, each: TriedSetting) -> tuple[str, ...]:
        if each.failure:
            return "–", "–", "–", "–", "–", "–", each.failure[:120]
        marked = {"best": self.best_options, "use this": self.options}
        marks = [word for word, options in marked.items() if key_of(options) == key_of(each.options)]
        return (
            format_seconds(each.loading_seconds),
            format_seconds(each.training_seconds),
            format_number(each.rate),
            f"{each.cores:.2f}",
            "–" if each.memory_bytes is None else format_bytes(each.memory_bytes),
            "–" if math.isnan(each.error) else f"± {100 * each.error:.1f} %",
            ", ".join(marks),
        )

    def _ranked(self) -> list[TriedSetting]:
        return sorted(self.tried, key=lambda each: (bool(each.failure), -each.rate if each.num_turns else 0.0))

    def _find(self, options: Options) -> TriedSetting:
        return next(each for each in self.tried if key_of(each.options) == key_of(options))


def _plain(options: Options) -> dict[str, Any]:
    plain = bool | int | float | str
    return {name: value if isinstance(value, plain) else repr(value) for name, value in options.items()}


def _tried_json(each: TriedSetting) -> dict[str, Any]:
    if each.failure:
        return {"options": _plain(each.options), "failure": each.failure}
    names = ("num_turns", "rate", "loading_seconds", "training_seconds", "cores")
    figures = {name: getattr(each, name) for name in names}
    error = None if math.isnan(each.error) else each.error
    return {"options": _plain(each.options), **figures, "memory_bytes": each.memory_bytes, "error": error}


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
            with contextlib.suppress(StateError):  # batches out of order have no state
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

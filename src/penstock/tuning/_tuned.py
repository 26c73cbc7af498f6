"""What tuning found: the table of settings tried, the best, the cheapest that is as good, and the settings file."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import counted
from penstock.filesystem import put_in_place
from penstock.loader import FILE_NAME, format_settings
from penstock.report import Arm, Fact, FigureTable, Gain, Headline, Page, format_bytes, format_number, format_seconds
from penstock.tuning._arms import Options, key_of, name_of, num_workers_of
from penstock.tuning._job import Measured
from penstock.tuning._race import Turn, cheapest_within_noise, compare

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

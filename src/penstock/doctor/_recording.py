"""What a process under the doctor records, and what is read of it afterwards.

Each process writes events into a file of its own, and rare facts as lines of JSON into one file for all. Children begin
files of their own after a fork. A line is one write to a file opened for appending, so that lines of several processes
do not mix. Everything is readable after any death.
"""

import contextlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from penstock.doctor._experiment import AS_IS, REPLAY, Trial, TurnResult, compare_with_baseline
from penstock.machine import EventKind, EventWriter, ThreadMeter, no_events, read_events, read_process
from penstock.tuning import Comparison

FOLDER_VARIABLE = "PENSTOCK_DOCTOR"
FACTS, SETTINGS = "facts.jsonl", "settings.json"
_DELAY_EVERY_NS = 50_000_000
"""Reading it takes 40 µs if caches are cold, and lets go of the interpreter's lock, for which others may wait."""
_MEMORY_EVERY_NS = 500_000_000
_MOST_MEMORY_SHARE = 0.002
"""Share of the time that a worker may spend looking at its memory, after its first looks: growth shows early."""
_FIRST_LOOKS = 12

Fact = Mapping[str, Any]


class RunSettings(TypedDict):
    """What the doctor leaves for the processes of a script: `DoctorSettings`, and who it is."""

    seconds: float
    steps: int | None
    full: bool
    observe: bool
    turn_seconds: float
    doctor: list[int] | None
    """As `name_process` names it."""


class _Nowhere:
    """Discards events."""

    def add(self, *what: Any, **more: Any) -> None:
        """Do nothing."""


class Recorder:
    """Writes for one process; nothing once the doctor has ended and its folder is gone."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.pid = folder, os.getpid()
        self.worker = -1
        """The number of this process among its loader's workers; -1 in a trainer."""
        self.loader = self.trial = self.sequence = 0
        """Which loader and trial a worker makes batches for, and the number of the batch it is making."""
        self.memory_due_at = self.num_memory_looks = 0
        """When a worker looks at its memory again, and how often it did."""
        self._events: EventWriter | _Nowhere | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether the doctor is still there to read it."""
        return self.folder.is_dir()

    @property
    def events(self) -> EventWriter | _Nowhere:
        """The file of this process, made when something happens."""
        if self._events is None:
            try:
                self._events = EventWriter(self.folder / f"{self.pid}-{time.monotonic_ns()}.events")
            except OSError:
                self._events = _Nowhere()
        return self._events

    def add(self, kind: int, start_ns: int, end_ns: int, *, sequence: int | None = None, **more: Any) -> None:
        """Write an event of the batch that this process works on, or of the batch with the number `sequence`."""
        number, of = self.sequence if sequence is None else sequence, {"loader": self.loader, "trial": self.trial}
        self.events.add(kind, start_ns, end_ns, **of, worker=self.worker, sequence=number, **more)

    def look_at_memory(self, read_bytes: Callable[[], int] | None = None) -> None:
        """Record this worker's own memory, and when to look again: late enough to bound what looking costs."""
        begin = time.perf_counter_ns()
        self.add(EventKind.MEMORY, begin, begin, value=(read_bytes or _private_bytes)())
        end = time.perf_counter_ns()
        self.num_memory_looks += 1
        bound = int((end - begin) / _MOST_MEMORY_SHARE) if self.num_memory_looks >= _FIRST_LOOKS else 0
        self.memory_due_at = end + max(_MEMORY_EVERY_NS, bound)

    def note(self, fact: str, **fields: Any) -> None:
        """Write a fact."""
        line = json.dumps({"fact": fact, "pid": self.pid, "time": time.perf_counter(), **fields}, default=repr) + "\n"
        with contextlib.suppress(OSError):  # a full disk, or a missing folder, must not disturb the script
            descriptor = os.open(self.folder / FACTS, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.write(descriptor, line.encode())
            finally:
                os.close(descriptor)


class StepRecorder:
    """Writes the steps of a training thread."""

    def __init__(self, log: Recorder) -> None:
        self._log = log
        self._meter: ThreadMeter | None = None
        self._last_cpu, self._last_delay = 0, 0.0
        self._delay_due_at = 0

    def add(self, *, loader: int, trial: int, sequence: int, rows: int, begin: int, waited: int) -> None:
        """A batch of `rows` samples is about to be handed over, after `waited` nanoseconds."""
        before, self._last_cpu = self._last_cpu, time.thread_time_ns()
        self._log.events.add(
            EventKind.NEXT,
            begin,
            begin + waited,
            loader=loader,
            trial=trial,
            sequence=sequence,
            cpu_seconds=(self._last_cpu - before) / 1e9,
            value=rows,
            extra=self._new_delay(begin),
        )

    def _new_delay(self, now: int) -> int:
        """Nanoseconds that this thread was ready and had no core since that was last read; 0 if that was just now."""
        if now < self._delay_due_at:
            return 0
        self._delay_due_at = now + _DELAY_EVERY_NS
        if self._meter is None:
            self._meter = ThreadMeter()
            self._last_delay = self._meter.read_delay() or 0.0
        before, self._last_delay = self._last_delay, self._meter.read_delay() or 0.0
        return int(1e9 * (self._last_delay - before))


def _private_bytes() -> int:
    """Memory that this process shares with no other; 0 where the kernel does not say.

    The kernel walks through all pages of the process: 3 ms once torch is loaded, more with the dataset.
    """
    try:
        with open("/proc/self/smaps_rollup", "rb") as file:
            return sum(1024 * int(line.split()[1]) for line in file if line.startswith(b"Private_Dirty:"))
    except (OSError, ValueError, IndexError):
        return 0


def name_process(pid: int) -> list[int] | None:
    """A name that no other process will ever have; None if there is no such process, or it cannot be read."""
    usage = read_process(pid)
    return None if usage is None else [pid, usage.started_ticks]


@cache
def recorder() -> Recorder:
    """The recorder of this process."""
    return Recorder(Path(os.environ[FOLDER_VARIABLE]))


os.register_at_fork(after_in_child=recorder.cache_clear)


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A run of a script, as it was seen."""

    facts: Sequence[Fact]
    events: NDArray[np.void]
    """Of all processes, by start."""
    machine: Fact = field(default_factory=dict)
    """What was measured from outside, while it ran: `job_cores` and `other_cores`, as in `Usage`."""

    def of(self, fact: str) -> Iterator[Fact]:
        """The facts of one kind, in order."""
        return (each for each in self.facts if each["fact"] == fact)

    def has(self, fact: str) -> bool:
        """Whether there is a fact of this kind."""
        return next(self.of(fact), None) is not None

    @cached_property
    def leader(self) -> Fact | None:
        """The loop that was experimented on: the one with most turns, of the rank that decides."""
        turns = [each["pid"] for each in self.of("turn")]
        candidates = [each for each in self.of("primary") if each.get("rank", 0) == 0]
        return max(candidates, key=lambda each: turns.count(each["pid"]), default=None)

    @cached_property
    def _leaders(self) -> set[int]:
        """The processes that decided which trial is next: one in each run of the script."""
        again = [number for number, each in enumerate(self.facts) if each["fact"] == "again"]
        edges = [0, *again, len(self.facts)]
        runs = (Recording(facts=self.facts[a:b], events=self.events) for a, b in itertools.pairwise(edges))
        return {run.leader["pid"] for run in runs if run.leader is not None}

    @cached_property
    def loader(self) -> Fact | None:
        """The loader that was experimented on, or the one that gave most batches."""
        leader = self.leader
        if leader is not None:
            pid, number = leader["pid"], leader["loader"]
        else:
            nexts = self.events[self.events["kind"] == EventKind.NEXT]
            if not len(nexts):
                return next(self.of("loader"), None)
            pid, number = None, int(_most_common(nexts["loader"]))
        return next((x for x in self.of("loader") if x["loader"] == number and pid in (None, x["pid"])), None)

    @cached_property
    def trials(self) -> list[Trial]:
        """What was tried, the baseline and its replay first."""
        return [AS_IS, REPLAY, *self.chosen]

    @cached_property
    def chosen(self) -> list[Trial]:
        """The changes that were to be tried."""
        facts = {each["trial"]: each for each in self.of("trial")}
        return [
            Trial(number=number, name=each["name"], kind=each["kind"], changes=each["changes"])
            for number, each in facts.items()
        ]

    @property
    def likeliest(self) -> Trial | None:
        """The change that was tried first; None if the ceiling was measured first."""
        numbers = [each["trial"] for each in self.of("trial") if each.get("likeliest")]
        return next((trial for trial in self.chosen if trial.number in numbers), None)

    @cached_property
    def turns(self) -> list[TurnResult]:
        """The turns of the experiment, in order, over all runs of the script; after a restart, those since."""
        turns: list[TurnResult] = []
        leaders = self._leaders
        for each in self.facts:
            if each["fact"] == "restart" and each["pid"] in leaders:
                turns.clear()
            elif each["fact"] == "turn" and each["pid"] in leaders:
                turns.append(TurnResult(*(each[name] for name in TurnResult._fields)))
        return turns

    @cached_property
    def whole_epochs(self) -> bool:
        """Whether turns were whole epochs."""
        return self.has("restart") or bool(self.leader is not None and self.leader["whole_epochs"])

    def gain_of(self, trial: int) -> Comparison | None:
        """A trial against the baseline."""
        return compare_with_baseline(self.turns, trial)

    @cached_property
    def ceiling(self) -> Comparison | None:
        """What a loader that costs nothing would give."""
        return self.gain_of(REPLAY.number)

    def events_as_is(self, kind: EventKind) -> NDArray[np.void]:
        """Baseline events of the loader that was experimented on."""
        number = None if self.loader is None else self.loader["loader"]
        mine = (self.events["kind"] == kind) & (self.events["trial"] == 0)
        found: NDArray[np.void] = self.events[mine & (self.events["loader"] == number)]
        return found


def read_recording(folder: Path, machine: Fact | None = None) -> Recording:
    """Everything in a folder. Lines and records that a dying process left in pieces are left out."""
    parts = [read_events(path) for path in sorted(folder.glob("*.events"))]
    events = np.concatenate(parts) if parts else no_events()
    events = events[np.argsort(events["start"], kind="stable")]
    return Recording(facts=list(_facts(folder / FACTS)), events=events, machine=machine or {})


def read_trials(folder: Path) -> list[Trial]:
    """What is tried in a run, as far as it is known."""
    return Recording(facts=list(_facts(folder / FACTS)), events=no_events()).trials


def _facts(path: Path) -> Iterator[Fact]:
    if path.exists():
        for line in path.read_bytes().splitlines():
            try:
                fact = json.loads(line)
            except ValueError:
                continue
            if isinstance(fact, dict) and "fact" in fact:
                yield fact


def _most_common(values: Any) -> Any:
    found, counts = np.unique(values, return_counts=True)
    return found[counts.argmax()]

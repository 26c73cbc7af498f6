"""What a run under the doctor left in its folder, as data: facts, turns and events. Readable after any death.

An excerpt of it is one small JSON file, without the machine's paths, from which the same findings are made:

    {"facts": [{"fact": "loader", …}, …], "machine": {"other_cores": 0.1, …}, "events": "<deflated, in base64>"}
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.doctor._experiment import AS_IS, REPLAY, Estimate, Trial, TurnResult, estimate
from penstock.doctor._recorder import FACTS
from penstock.machine import EventKind, no_events, read_events

_MOST_OF_A_KIND = 400
_LEFT_OUT = ("process", "not-saved")

Fact = Mapping[str, Any]


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
        chosen = {each["trial"]: each for each in self.of("trial")}
        return [
            AS_IS,
            REPLAY,
            *(
                Trial(number=number, name=each["name"], kind=each["kind"], changes=each["changes"])
                for number, each in chosen.items()
            ),
        ]

    @cached_property
    def turns(self) -> list[TurnResult]:
        """The turns of the experiment, in order; after a restart, those since."""
        turns: list[TurnResult] = []
        pid = None if self.leader is None else self.leader["pid"]
        for each in self.facts:
            if each["pid"] == pid and each["fact"] == "restart":
                turns.clear()
            elif each["pid"] == pid and each["fact"] == "turn":
                turns.append(TurnResult(*(each[name] for name in TurnResult._fields)))
        return turns

    @cached_property
    def whole_epochs(self) -> bool:
        """Whether turns were whole epochs."""
        return self.has("restart") or bool(self.leader is not None and self.leader["whole_epochs"])

    def estimate(self, trial: int) -> Estimate | None:
        """The gain of a trial."""
        return estimate(self.turns, trial)

    @cached_property
    def ceiling(self) -> Estimate | None:
        """What a loader that costs nothing would give."""
        return self.estimate(REPLAY.number)

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


def make_excerpt(recording: Recording) -> str:
    """The facts, and the first baseline events of each kind."""
    events, loader = recording.events, recording.loader
    mine = events[(events["trial"] == 0) & (events["loader"] == (0 if loader is None else loader["loader"]))]
    kept = [mine[mine["kind"] == kind][:_MOST_OF_A_KIND] for kind in np.unique(mine["kind"])]
    chosen = np.concatenate(kept) if kept else no_events()
    facts = [fact for fact in recording.facts if fact["fact"] not in _LEFT_OUT]
    packed = zlib.compress(chosen[np.argsort(chosen["start"], kind="stable")].tobytes(), 9)
    text = base64.b64encode(packed).decode()
    return json.dumps({"facts": facts, "machine": dict(recording.machine), "events": text}) + "\n"


def read_excerpt(text: str) -> Recording:
    """The recording that an excerpt was made from, as far as it was kept."""
    saved = json.loads(text)
    events = np.frombuffer(zlib.decompress(base64.b64decode(saved["events"])), no_events().dtype)
    return Recording(facts=saved["facts"], events=events, machine=saved["machine"])


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

"""The diagnosis of a run: the verdict in a sentence, the ceiling, and findings.

The verdict is never vaguer than a clock: it has the share of the time spent waiting, and the cause that settings and
times show even if there was no time to try a change. What was measured stands there with its margin.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.doctor._case import Case, percent
from penstock.doctor._findings import Found, find, format_gain
from penstock.doctor._run import ScriptRun
from penstock.errors import counted
from penstock.machine import EventKind
from penstock.report import Finding, Gain, format_seconds

_MUCH = 0.2
"""Share of the time that may be left out without a word."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What the doctor says."""

    verdict: str
    """One sentence."""
    is_healthy: bool
    ceiling: Gain | None
    """What a loader that costs nothing would give; None when it was not measured."""
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    run: ScriptRun
    case: Case | None
    """None when the script made no loader."""

    @property
    def exit_code(self) -> int:
        """0 healthy, 1 findings; the script's own when it failed, 128 + n when signal n ended the run."""
        if self.run.interrupted_by is not None:
            return 128 + self.run.interrupted_by
        if self.run.exit_code and not self.run.was_stopped:
            return self.run.exit_code
        return 1 if self.findings else 0

    def to_json(self) -> dict[str, Any]:
        """Plain data for programs."""
        machine = dataclasses.asdict(self.run.usage.machine)
        return {
            "verdict": self.verdict,
            "healthy": self.is_healthy,
            "ceiling": None if self.ceiling is None else dataclasses.asdict(self.ceiling),
            "loader": None if self.case is None else self.case.loader["where"],
            "findings": [_finding_json(each) for each in self.findings],
            "machine": machine | self.run.usage.cores(),
            "notes": list(self.notes),
            "script_exit_code": self.run.exit_code,
        }


def diagnose(run: ScriptRun) -> Diagnosis:
    """Say what is wrong with a run, if anything is."""
    recording, notes = run.recording, list(_notes(run))
    unfed = next(recording.of("unfed"), None)
    only_validates = unfed is not None and not unfed["batches"] and recording.ceiling is None
    if recording.loader is None or only_validates or not (recording.events["kind"] == EventKind.NEXT).any():
        return _without_batches(run, notes)
    case = Case(recording=recording, cores=run.usage.machine.usable_processors, is_observed=run.is_observed)
    found = find(case)
    if case.costs.left_out > _MUCH:
        notes.append(
            f"{percent(case.costs.left_out)} of the time went to steps that took over ten times as long as usual, "
            "as with validation or a checkpoint: what is said of steps leaves them out."
        )
    ceiling = recording.ceiling
    return Diagnosis(
        verdict=verdict_of(case, found),
        is_healthy=not found and (unfed is not None or not case.is_unclear),
        ceiling=None if ceiling is None else ceiling.gain,
        findings=tuple(each.finding for each in found),
        notes=tuple(notes),
        run=run,
        case=case,
    )


def _without_batches(run: ScriptRun, notes: list[str]) -> Diagnosis:
    failed = run.exit_code and not run.was_stopped
    unfed = next(run.recording.of("unfed"), None)
    if unfed is not None:
        verdict = (
            f"The script trains without a DataLoader: its optimizer made {unfed['steps']} steps, and none of their "
            "batches came from a loader of torch's or Penstock's. The doctor can neither see nor change what makes "
            "them; take them from a DataLoader, or wrap what yields them in penstock.watch."
        )
    elif run.recording.loader is not None:
        verdict = "The script made a DataLoader and never took a batch from it."
    elif failed:
        verdict = f"The script ended with exit code {run.exit_code} before it made a DataLoader."
    else:
        verdict = "The script made no DataLoader of torch's or Penstock's, so there was nothing to look at."
    return Diagnosis(
        verdict=verdict, is_healthy=False, ceiling=None, findings=(), notes=tuple(notes), run=run, case=None
    )


def verdict_of(case: Case, found: Sequence[Found]) -> str:
    """One sentence on whether it waits for data, with the share of the time; then what would help most."""
    costs, ceiling = case.costs, case.recording.ceiling
    share = percent(costs.wait_share)
    if ceiling is None and case.recording.has("unfed"):
        return "Not waiting for data: the script keeps the batches that it took, and soon asks its loader for no more."
    free = "" if ceiling is None else f"a loader that costs nothing would make it {format_gain(ceiling.gain)} faster"
    if case.others_hold_cores:
        start = (
            f"Not waiting for data, but for processors, {share} of the time: other programs used "
            f"{case.other_cores:.1f} of the {case.cores} cores. With a core whenever it was ready for one, a worker "
            f"would make a batch in {format_seconds(costs.making)}, and a step would take "
            f"{format_seconds(costs.training)}."
        )
    elif case.waits_for_data:
        start = f"Training waits for data {share} of the time."
    elif ceiling is None:
        steps = counted(costs.num_steps, "step")
        advice = "give it more time with --seconds" if case.recording.has("out-of-time") else "let it run longer"
        start = f"Training waited for data {share} of the time, in {steps}: {advice}, to know more."
    elif case.is_unclear:
        start = f"Training waits for data {share} of the time. Cannot tell whether that can be less: {free}."
    else:
        start = f"Not waiting for data: it takes {share} of the time, and {free}."
    return f"{start} {found[0].finding.title}. {found[0].told}" if found else start


def _notes(run: ScriptRun) -> list[str]:
    """What a reader must know to trust the figures."""
    notes, usage, recording = [], run.usage, run.recording
    total = usage.machine.num_processors
    if usage.other_cores > 0.25 * total:
        notes.append(f"Other programs used {usage.other_cores:.1f} of the {total} cores: that widens every interval.")
    if run.interrupted_by is not None:
        notes.append("Interrupted: this is what was seen until then.")
    elif run.exit_code and not run.was_stopped:
        notes.append(f"The script itself ended with exit code {run.exit_code}; this is what was seen until then.")
    elif recording.leader is not None and not recording.has("done") and not recording.has("unfed"):
        notes.append("The script ended before all was tried; --repeat runs it again until then.")
    notes += [
        f"After {each['batches']} batches, training went on for {each['steps']} steps without asking a loader for one, "
        "as it does with itertools.cycle, which keeps them all in memory."
        for each in recording.of("unfed")
        if each["batches"]
    ]
    if not run.is_observed and recording.has("out-of-time"):
        notes.append("Time ran out before all was tried: more with --seconds narrows the intervals.")
    for each in recording.of("failed"):
        name = next((trial.name for trial in recording.trials if trial.number == each["trial"]), "a change")
        notes.append(f"{name} could not be tried: {each['reason']}")
    notes += [
        f"{each['function']} of {each['target']} while the script was stopping wrote nothing."
        for each in recording.of("not-saved")
    ]
    notes += [f"One process could not be watched: {each['reason']}" for each in recording.of("blind")]
    return list(dict.fromkeys(notes))


def _finding_json(finding: Finding) -> dict[str, Any]:
    return {
        "id": finding.id,
        "title": finding.title,
        "evidence": list(finding.evidence),
        "change": finding.change,
        "where": finding.where,
        "price": finding.price,
        "measured_gain": None if finding.gain is None else finding.gain.ratio,
        "error": None if finding.gain is None else finding.gain.error,
        "limit": None if finding.limit is None else finding.limit.ratio,
        "link": finding.link,
    }

"""The diagnosis of a run: the verdict in a sentence, the ceiling, findings; and the page that `report` draws of it.

The verdict is never vaguer than a clock: it has the share of the time spent waiting, and the cause that settings and
times show even if there was no time to try a change. What was measured stands there with its margin.
"""

import dataclasses
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.doctor._case import Case, percent
from penstock.doctor._experiment import AS_IS
from penstock.doctor._findings import Found, find
from penstock.doctor._run import ScriptRun
from penstock.errors import counted
from penstock.machine import EventKind
from penstock.report import (
    Arm,
    Finding,
    Gain,
    Headline,
    Lane,
    Page,
    SlowSample,
    Span,
    SpanKind,
    StepTimes,
    format_gain,
    format_seconds,
)
from penstock.watching import machine_facts, usage_charts

_MUCH = 0.2
"""Share of the time that may be left out without a word."""

_MOST_SPANS = 3000
_MOST_STEPS = 400
_TITLE_LENGTH = 80
_SLOWEST = 8
_LITTLE = 0.05
"""Share of the time; a job that waits less has no steps worth pointing at."""
_KINDS: dict[int, SpanKind] = {
    EventKind.NEXT: "wait",
    EventKind.START: "start",
    EventKind.SAMPLE: "sample",
    EventKind.COLLATE: "collate",
    EventKind.PICKLE: "handover",
    EventKind.UNPICKLE: "handover",
    EventKind.IDLE: "idle",
}


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


def make_page(diagnosis: Diagnosis) -> Page:
    """Everything that was seen, as a page for readers."""
    command = diagnosis.run.command
    shown = command[1:] if command[0] == sys.executable else command
    words = " ".join(map(os.path.basename, shown))
    machine = tuple(machine_facts(diagnosis.run.usage.machine))
    tone = "good" if diagnosis.is_healthy else ("bad" if diagnosis.findings else "plain")
    title = f"penstock doctor · {words if len(words) <= _TITLE_LENGTH else words[: _TITLE_LENGTH - 2] + ' …'}"
    if diagnosis.case is None:
        return Page(title=title, verdict=diagnosis.verdict, machine=machine, notes=diagnosis.notes)
    case = diagnosis.case
    steps, history = _step_times(case), diagnosis.run.usage.history
    origin = float(case.recording.events["start"][0]) / 1e9
    waits = () if steps is None else _long_waits(steps)  # a click on a finding that was measured shows these
    return Page(
        title=title,
        verdict=diagnosis.verdict,
        tone=tone,  # type: ignore[arg-type]
        headlines=_headlines(diagnosis, case),
        findings=tuple(
            each if each.gain is None else dataclasses.replace(each, steps=waits) for each in diagnosis.findings
        ),
        lanes=_lanes(case, origin),
        steps=steps,
        charts=()
        if history is None
        else tuple(usage_charts(history, origin, root="the script", children="its workers")),
        arms=_arms(diagnosis, case),
        slowest=_slowest(case),
        machine=machine,
        notes=diagnosis.notes,
    )


def _headlines(diagnosis: Diagnosis, case: Case) -> tuple[Headline, ...]:
    costs, usage = case.costs, diagnosis.run.usage
    rate = 1 / max(costs.wait + costs.step, 1e-9)
    found = [
        Headline(value=f"{rate:.3g}/s", label="steps now"),
        Headline(
            value=f"{100 * costs.wait_share:.0f} %",
            label="of the time spent waiting",
            tone="bad" if case.waits_for_data else "plain",
        ),
    ]
    if diagnosis.ceiling is not None:
        found.append(Headline(value=format_gain(diagnosis.ceiling), label="the most a better loader can give"))
    found.append(
        Headline(value=f"{usage.job_cores:.2f} + {usage.other_cores:.2f}", label="cores used here + by other programs")
    )
    return tuple(found)


def _lanes(case: Case, origin: float) -> tuple[Lane, ...]:
    """The first steps of the baseline: the trainer, and each of its workers."""
    events, number = case.recording.events, case.loader["loader"]
    nexts = case.recording.events_as_is(EventKind.NEXT)
    mine = events[(events["loader"] == number) & (events["trial"] == 0) & np.isin(events["kind"], list(_KINDS))]
    if not len(nexts):
        return ()
    consecutive = np.flatnonzero(np.diff(nexts["sequence"]) != 1)
    last = nexts[consecutive[0] if len(consecutive) else -1]
    mine = mine[mine["start"] <= last["start"]][:_MOST_SPANS]
    end = last["start"] + 1e9 * last["duration"]
    mine["duration"] = np.minimum(mine["duration"], (end - mine["start"]) / 1e9)
    lanes = [Lane(name="training", spans=_training_spans(mine, origin))]
    lanes += [
        Lane(name=f"worker {worker}", spans=_spans(mine[mine["worker"] == worker], origin))
        for worker in np.unique(mine["worker"])
        if worker >= 0
    ]
    inline = mine[(mine["worker"] < 0) & np.isin(mine["kind"], (EventKind.SAMPLE, EventKind.COLLATE))]
    if len(inline):
        lanes.append(Lane(name="in the loop", spans=_spans(inline, origin)))
    return tuple(lanes)


def _training_spans(events: NDArray[np.void], origin: float) -> tuple[Span, ...]:
    nexts = events[events["kind"] == EventKind.NEXT]
    starts = nexts["start"] / 1e9 - origin
    ends = starts + nexts["duration"]
    spans = list(_spans(events[events["kind"] == EventKind.START], origin))
    for number, event in enumerate(nexts):
        spans.append(
            Span(
                start=float(starts[number]), duration=float(event["duration"]), kind="wait", step=int(event["sequence"])
            )
        )
        if number + 1 < len(nexts):
            length = float(starts[number + 1] - ends[number])
            spans.append(
                Span(start=float(ends[number]), duration=max(0.0, length), kind="step", step=int(event["sequence"]))
            )
    return tuple(sorted(spans, key=lambda span: span.start))


def _spans(events: NDArray[np.void], origin: float) -> tuple[Span, ...]:
    return tuple(
        Span(
            start=float(event["start"]) / 1e9 - origin,
            duration=float(event["duration"]),
            kind=_KINDS[int(event["kind"])],
            label=f"sample {event['value']}" if event["kind"] == EventKind.SAMPLE and event["value"] >= 0 else "",
            step=int(event["sequence"]),
        )
        for event in events
    )


def _step_times(case: Case) -> StepTimes | None:
    nexts = case.recording.events_as_is(EventKind.NEXT)
    if len(nexts) < 3:
        return None
    ends = nexts["start"] / 1e9 + nexts["duration"]
    steps = nexts["start"][1:] / 1e9 - ends[:-1]
    waits = nexts["duration"][:-1].astype(np.float64)
    kept = np.flatnonzero(np.diff(nexts["sequence"]) == 1)[:_MOST_STEPS]
    return StepTimes(
        wait=tuple(waits[kept].tolist()),
        step=tuple(np.maximum(0, steps[kept]).tolist()),
        first=int(nexts["sequence"][0]),
    )


def _long_waits(times: StepTimes) -> tuple[tuple[int, int], ...]:
    """Ranges of steps that waited at least half of the mean: a few that hold up others, or all if all wait alike."""
    wait, step = np.array(times.wait), np.array(times.step)
    if wait.sum() <= _LITTLE * (wait.sum() + step.sum()):
        return ()
    is_long = np.concatenate([[False], wait >= wait.mean() / 2, [False]])
    edges = np.flatnonzero(np.diff(is_long)) + times.first
    return tuple((int(first), int(end)) for first, end in edges.reshape(-1, 2))


def _arms(diagnosis: Diagnosis, case: Case) -> tuple[Arm, ...]:
    recording = case.recording
    advised = {finding.gain.ratio for finding in diagnosis.findings if finding.gain is not None}
    arms = []
    for trial in recording.trials:
        turns = [turn for turn in recording.turns if turn.trial == trial.number]
        found = recording.gain_of(trial.number)
        if not turns or found is None:
            continue
        steps, seconds = sum(turn.steps for turn in turns), sum(turn.seconds for turn in turns)
        wait = sum(turn.wait_seconds for turn in turns)
        is_baseline = trial.number == AS_IS.number
        arms.append(
            Arm(
                name=trial.name,
                gain=Gain(ratio=1.0) if is_baseline else found.gain,
                steps_per_second=steps / max(seconds, 1e-9),
                wait_seconds=wait / max(1, steps),
                step_seconds=(seconds - wait) / max(1, steps),
                is_baseline=is_baseline,
                is_advised=not is_baseline and found.ratio in advised,
                note="" if found.num_rounds > 1 else "dropped after one turn",
            )
        )
    return tuple(sorted(arms, key=lambda arm: -arm.gain.ratio))


def _slowest(case: Case) -> tuple[SlowSample, ...]:
    samples = case.recording.events_as_is(EventKind.SAMPLE)
    if not len(samples) or case.costs.slow_sample_share < 0.1 or not case.waits_for_data:
        return ()
    slowest = samples[np.argsort(samples["duration"])[::-1][:_SLOWEST]]
    return tuple(
        SlowSample(
            index=str(each["value"]) if each["value"] >= 0 else "–",
            seconds=float(each["duration"]),
            cpu_seconds=float(each["cpu"]),
            step=int(each["sequence"]),
            worker=f"worker {each['worker']}" if each["worker"] >= 0 else "",
        )
        for each in slowest
    )

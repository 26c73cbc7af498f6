"""A diagnosis as a page that `report` draws."""

from __future__ import annotations

import dataclasses
import os
import sys

import numpy as np
from numpy.typing import NDArray

from penstock.doctor._case import Case
from penstock.doctor._diagnosis import Diagnosis
from penstock.doctor._experiment import AS_IS
from penstock.doctor._findings import format_gain
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
)
from penstock.watching import machine_facts, usage_charts

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
    origin, steps, history = _origin(case), _step_times(case), diagnosis.run.usage.history
    return Page(
        title=title,
        verdict=diagnosis.verdict,
        tone=tone,  # type: ignore[arg-type]
        headlines=_headlines(diagnosis, case),
        findings=_with_steps(diagnosis.findings, steps),
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


def _origin(case: Case) -> float:
    events = case.recording.events
    return float(events["start"][0]) / 1e9 if len(events) else 0.0


def _lanes(case: Case, origin: float) -> tuple[Lane, ...]:
    """The first steps of the baseline: the trainer, and each of its workers."""
    events, number = case.recording.events, case.loader["loader"]
    nexts = case.recording.events_as_is(EventKind.NEXT)
    mine = events[(events["loader"] == number) & (events["trial"] == 0) & np.isin(events["kind"], list(_KINDS))]
    if not len(nexts):
        return ()
    consecutive = np.flatnonzero(np.diff(nexts["sequence"]) != 1)
    last = nexts["start"][consecutive[0] if len(consecutive) else -1]
    mine = mine[mine["start"] <= last][:_MOST_SPANS]
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


def _with_steps(findings: tuple[Finding, ...], times: StepTimes | None) -> tuple[Finding, ...]:
    """A finding whose change makes training wait less points at the steps that waited, so that a click shows them."""
    waits = () if times is None else _long_waits(times)
    return tuple(
        dataclasses.replace(finding, steps=waits) if finding.gain is not None and not finding.steps else finding
        for finding in findings
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
    if not len(samples) or case.costs.slow_sample_share < 0.1:
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

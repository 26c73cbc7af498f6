"""Findings on recorded data: nothing runs here."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import doctor
from penstock.doctor import Diagnosis, Recording, ScriptRun, Usage, choose_trials
from penstock.machine import EventKind, describe_machine, no_events
from penstock.report import Finding

OPTIONS = {
    "batch_size": 16,
    "num_workers": 2,
    "prefetch_factor": 2,
    "persistent_workers": False,
    "pin_memory": False,
    "in_order": True,
    "timeout": 0,
}
Rates = dict[int, float]


def event(kind: EventKind, start: float, duration: float, **fields: float) -> np.ndarray:
    record = np.zeros(1, no_events().dtype)
    record["kind"], record["start"], record["duration"], record["loader"] = kind, int(start * 1e9) + 1, duration, 1
    for name, value in fields.items():
        record[name] = value
    return record


def steps(*, wait: float = 0.02, step: float = 0.01, fetch: float = 0.03, collate: float = 0.0, slow: float = 0.0,
          faults: int = 0, samples: int = 4, delay: float = 0.0) -> np.ndarray:  # fmt: skip
    """Sixty steps; every tenth batch takes `slow` seconds more, in one sample. Each waits `delay` for a core."""
    parts = []
    for number in range(60):
        now, more = number * (wait + step), slow if number % 10 == 0 else 0.0
        parts.append(event(EventKind.NEXT, now, wait, sequence=number, value=16, worker=-1))
        parts.append(event(EventKind.FETCH, now, fetch + more, cpu=fetch - delay, value=16, extra=faults))
        parts.append(event(EventKind.DELAY, now, fetch + more, value=1e9 * delay))
        parts.append(event(EventKind.COLLATE, now, collate, value=64))
        each = (fetch - collate) / max(1, samples)
        parts += [event(EventKind.SAMPLE, now, each + (more if not sample else 0.0)) for sample in range(samples)]
    return np.concatenate(parts)


def recorded(
    events: np.ndarray, trials: list[dict[str, Any]], rates: Rates, padding: float | None = None, **loader: Any
) -> Recording:
    """A recording in which each trial had three turns at a rate."""
    options = OPTIONS | loader.pop("options", {})
    facts: list[dict[str, Any]] = [
        {"fact": "loader", "pid": 1, "loader": 1, "where": "train.py:9", "kind": "torch", "is_plan": False,
         "workers": "process", "is_iterable": False, "context": None, "length": 1000, "prefetched": 4,
         "options": options} | loader,
        {"fact": "batch", "pid": 1, "loader": 1, "rows": 16, "bytes": 1000, "padding": padding, "can_regroup": True},
        {"fact": "primary", "pid": 1, "loader": 1, "rank": 0, "whole_epochs": False, "num_threads": 2},
    ]  # fmt: skip
    facts += [{"fact": "trial", "pid": 1, "name": "x"} | trial for trial in trials]
    for round_ in range(3):
        for number in (0, *rates):
            rate = (1.0 if number == 0 else rates[number]) * (1 + 0.01 * round_)
            turn = {"rows": 100 * rate, "steps": 10, "seconds": 1.0, "wait_seconds": 0.1}
            facts.append({"fact": "turn", "pid": 1, "trial": number} | turn)
    facts.append({"fact": "done", "pid": 1})
    return Recording(facts=facts, events=events)


def run_of(recording: Recording, cores: int = 2) -> ScriptRun:
    """A run that left this recording, on a machine with so many cores."""
    machine = replace(describe_machine(), usable_processors=cores)
    other_cores = recording.machine.get("other_cores", 0.0)
    return ScriptRun(
        command=("train.py",),
        exit_code=0,
        was_stopped=True,
        interrupted_by=None,
        is_observed=False,
        seconds=1.0,
        recording=recording,
        usage=Usage(machine=machine, history=None, job_cores=0.5, other_cores=other_cores),
    )


def diagnosed(recording: Recording, cores: int = 2) -> Diagnosis:
    return doctor.diagnose(run_of(recording, cores))


def find(recording: Recording, cores: int = 2) -> list[Finding]:
    return list(diagnosed(recording, cores).findings)


def with_ceiling(recording: Recording, rates: tuple[float, ...]) -> Recording:
    """The same with other turns: a replay at each of these rates, after one of the baseline."""
    turns = [
        {"fact": "turn", "pid": 1, "trial": number, "rows": rate, "steps": 10, "seconds": 1.0, "wait_seconds": 0.1}
        for each in rates
        for number, rate in ((0, 1.0), (1, each))
    ]
    facts = [each for each in recording.facts if each["fact"] != "turn"] + turns
    return Recording(facts=facts, events=recording.events)


def option(number: int, **changes: Any) -> dict[str, Any]:
    return {"trial": number, "kind": "options", "changes": changes}


CASES = {
    "no-workers": (steps(), [option(2, num_workers=2)], {"num_workers": 0}),
    "few-workers": (steps(), [option(2, num_workers=4)], {}),
    "too-many-workers": (steps(), [option(2, num_workers=2)], {"num_workers": 16}),
    "needless-workers": (steps(fetch=0.0004), [option(2, num_workers=0)], {}),
    "heavy-collate": (steps(collate=0.02), [option(2, num_workers=4)], {}),
    "small-prefetch": (steps(slow=0.3, samples=0), [option(2, prefetch_factor=16)], {}),
    "slow-samples": (steps(slow=0.3, samples=8), [option(2, in_order=False)], {}),
    "workers-restart": (steps(), [option(2, persistent_workers=True)], {}),
    "cold-reads": (steps(faults=9), [{"trial": 2, "kind": "warm", "changes": {}}], {}),
    "hand-over": (steps(), [{"trial": 2, "kind": "penstock", "changes": {}}], {}),
}


@pytest.mark.parametrize("expected", CASES)
def test_the_cause_that_the_times_show_is_named_first_with_its_gain(expected: str) -> None:
    events, trials, options = CASES[expected]
    recording = recorded(events, trials, {1: 2.0, 2: 1.8}, options=options)
    first = find(recording)[0]
    assert first.id == expected
    assert first.gain is not None
    assert first.gain.ratio == pytest.approx(1.8, rel=0.05)
    assert first.where == "train.py:9"


def test_workers_that_restart_for_epochs_of_unknown_length_are_named() -> None:
    events, trials, options = CASES["workers-restart"]
    recording = recorded(events, trials, {1: 2.0, 2: 1.8}, options=options, is_iterable=True, length=None)
    assert find(recording)[0].id == "workers-restart"


@pytest.mark.parametrize(
    ("rates", "expected"), [({2: 1.8, 3: 1.3}, "few-workers"), ({2: 1.3, 3: 1.8}, "small-prefetch")]
)
def test_of_a_plan_whose_batches_are_not_timed_one_by_one_what_helps_most_names_the_cause(
    rates: Rates, expected: str
) -> None:
    plan = {"kind": "penstock", "is_plan": True, "options": {"num_workers": 1}}
    trials = [option(2, num_workers=2), option(3, prefetch=16)]
    first = find(recorded(steps(samples=0), trials, {1: 2.0, **rates}, **plan))[0]
    assert first.id == expected
    assert first.gain is not None
    assert first.gain.ratio == pytest.approx(1.8, rel=0.05)
    assert "Half of the batches" not in " ".join(first.evidence)


@pytest.mark.parametrize("expected", CASES)
def test_a_change_that_made_it_slower_is_never_advised(expected: str) -> None:
    events, trials, options = CASES[expected]
    found = find(recorded(events, trials, {1: 2.0, 2: 0.8}, options=options))
    assert [each.id for each in found] == ["costly-samples"]
    assert found[0].gain is None
    assert found[0].limit is not None


@pytest.mark.parametrize("expected", CASES)
def test_a_job_that_does_not_wait_is_told_nothing(expected: str) -> None:
    events, _, options = CASES[expected]
    assert find(recorded(events, [], {1: 1.05}, options=options)) == []


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ((1.02, 1.0, 1.04), "Not waiting for data"),
        ((0.5, 1.0, 2.2), "Cannot tell"),
        ((1.8, 2.0, 2.1), "waits for data"),
    ],
)
def test_a_wide_interval_is_no_sign_of_health(rates: tuple[float, ...], expected: str) -> None:
    found = diagnosed(with_ceiling(recorded(steps(), [], {}), rates))
    assert expected in found.verdict
    assert found.case is not None
    assert found.case.is_unclear is (expected == "Cannot tell")


@pytest.mark.parametrize(
    ("delay", "other_cores", "workers", "is_healthy"),
    [(0.022, 1.4, 1, True), (0.022, 0.1, 1, False), (0.01, 1.4, 1, False), (0.022, 1.4, 8, False)],
    ids=["others hold the cores", "nobody else is there", "samples cost much, too", "its own workers are too many"],
)
def test_a_job_that_would_keep_up_with_a_core_to_itself_is_told_nothing_but_that(
    delay: float, other_cores: float, workers: int, is_healthy: bool
) -> None:
    recording = recorded(steps(delay=delay), [], {1: 2.0}, options={"num_workers": workers})
    busy = Recording(facts=recording.facts, events=recording.events, machine={"other_cores": other_cores})
    found = diagnosed(busy)
    assert (found.findings == ()) is is_healthy
    assert ("Not waiting for data, but for processors" in found.verdict) is is_healthy
    assert found.case is not None
    assert not found.case.is_unclear
    told = " ".join(text for each in found.findings for text in each.evidence)
    has_told = "Other programs used 1.4 of the 2 cores" in told
    assert has_told is (not is_healthy and other_cores > 1)


@pytest.mark.parametrize(("other_cores", "said"), [(1.4, "Not waiting for data, but"), (0.1, "Not waiting for data:")])
def test_a_job_that_hardly_waits_is_not_told_that_its_samples_cost_much(other_cores: float, said: str) -> None:
    recording = recorded(steps(wait=0.0002), [], {1: 1.3})
    busy = Recording(facts=recording.facts, events=recording.events, machine={"other_cores": other_cores})
    found = diagnosed(busy)
    assert found.findings == ()
    assert found.verdict.startswith(said)
    assert found.case is not None
    assert not found.case.is_unclear


@pytest.mark.parametrize(("fetch", "is_healthy"), [(0.001, True), (0.008, False)])
def test_a_loader_that_could_make_many_more_batches_may_take_a_little_to_hand_them_over(
    fetch: float, is_healthy: bool
) -> None:
    found = diagnosed(recorded(steps(wait=0.0008, fetch=fetch), [], {1: 1.2}, options={"num_workers": 1}))
    assert (found.findings == ()) is is_healthy


def test_a_change_that_helps_is_told_to_a_job_that_hardly_waits() -> None:
    recording = recorded(steps(wait=0.0002), [option(2, num_workers=4)], {1: 1.9, 2: 1.8})
    assert find(recording, cores=4)[0].gain is not None


def without_turns(recording: Recording, *trials: int) -> list[Any]:
    """The facts of a run that ended before these trials had a turn."""
    return [
        each
        for each in recording.facts
        if each["fact"] != "done" and not (each["fact"] == "turn" and each["trial"] in trials)
    ]


OUT_OF_TIME = [{"fact": "out-of-time", "pid": 1}, {"fact": "done", "pid": 1}]
UNTRIED = {"no-workers": "num_workers=4", "heavy-collate": "num_workers=4", "small-prefetch": "prefetch_factor=26"}


@pytest.mark.parametrize("has_ceiling", [True, False])
@pytest.mark.parametrize("ends", ["time", "script"])
@pytest.mark.parametrize("expected", UNTRIED)
def test_without_time_to_try_anything_the_cause_is_what_times_and_settings_show(
    expected: str, ends: str, has_ceiling: bool
) -> None:
    events, _, options = CASES[expected]
    recording = recorded(events, [], {1: 2.0}, options=options)
    facts = without_turns(recording, *([] if has_ceiling else [1])) + (OUT_OF_TIME if ends == "time" else [])
    found = diagnosed(Recording(facts=facts, events=recording.events), cores=4)
    (finding,) = found.findings
    assert finding.id == expected
    assert UNTRIED[expected] in finding.change
    assert finding.gain is None
    assert finding.limit is not None
    assert finding.limit.ratio == pytest.approx(2.0 if has_ceiling else 3.0, rel=0.05)
    assert found.verdict.startswith(f"Training waits for data 67 % of the time. {finding.title}. ")
    why = "time ran out" if ends == "time" else "the script ended after 60 steps"
    assert f" should help, but {why}" in found.verdict
    assert ("--seconds 120" if ends == "time" else "run it again with --repeat") in finding.evidence[-1]
    assert found.exit_code == 1


def test_a_change_like_one_that_made_it_slower_is_not_said_to_help() -> None:
    recording = recorded(steps(), [option(2, num_workers=2)], {1: 2.0, 2: 0.5}, options={"num_workers": 0})
    facts = without_turns(recording)[:-1]  # before the last turn of the change
    found = diagnosed(Recording(facts=facts, events=recording.events), cores=4)
    assert "With x, training was 0.50 × as fast; num_workers=4 may help, but the script ended" in found.verdict


def test_a_change_that_was_measured_is_told_also_without_a_ceiling() -> None:
    """The likeliest is tried first, so there may be no more."""
    recording = recorded(steps(), [option(2, num_workers=2)], {1: 2.0, 2: 1.8}, options={"num_workers": 0})
    found = diagnosed(Recording(facts=without_turns(recording, 1), events=recording.events))
    assert [each.id for each in found.findings] == ["no-workers"]
    assert re.fullmatch(
        r"Training waits for data 67 % of the time\. Batches are made in the training process \(num_workers=0\)\. "
        r"With x, training was 1\.79 ± 0\.0\d × faster\.",
        found.verdict,
    )


def test_a_change_whose_turns_differ_too_much_is_told_with_its_margin_and_its_cause() -> None:
    recording = recorded(steps(), [option(2, num_workers=2)], {1: 2.0, 2: 1.5}, options={"num_workers": 0})
    rates = iter((1.0, 1.5, 2.0))
    for fact in recording.facts:
        if fact["fact"] == "turn" and fact["trial"] == 2:
            fact["rows"] = 100 * next(rates)  # type: ignore[index]
    found = diagnosed(recording)
    assert [each.id for each in found.findings] == ["no-workers"]
    assert found.findings[0].gain is None
    assert re.search(
        r"With x, training was 1\.\d\d ± \d\.\d\d × faster in 3 turns, but that is within the noise", found.verdict
    )


def test_what_was_only_observed_is_told_with_its_cause() -> None:
    recording = recorded(steps(), [], {}, options={"num_workers": 0})
    seen = Recording(facts=without_turns(recording), events=recording.events)
    found = doctor.diagnose(replace(run_of(seen), is_observed=True))
    assert [each.id for each in found.findings] == ["no-workers"]
    assert found.findings[0].evidence[-1].endswith("leave out --observe.")


@pytest.mark.parametrize("wait", [0.02, 0.002])
@pytest.mark.parametrize("turns", [(), (7.33,), (0.5, 1.0, 2.2), (1.0, 1.3, 1.6), (1.02, 1.0, 1.04), (1.8, 2.0, 2.1)])
def test_whatever_was_measured_the_share_of_the_time_is_told(wait: float, turns: tuple[float, ...]) -> None:
    recording = recorded(steps(wait=wait), [], {})
    told = diagnosed(with_ceiling(recording, turns)).verdict
    assert f"{100 * wait / (wait + 0.01):.0f} % of the time" in told
    assert "± 7.33" not in told


@pytest.mark.parametrize(
    ("ratio", "error", "wait", "is_healthy"),
    [
        (0.98, 0.05, 0.02, True),  # the device computes meanwhile
        (0.98, 0.21, 0.02, False),
        (0.98, 0.21, 0.0008, True),  # the clock agrees
        (0.98, 0.60, 0.0008, False),
        (1.12, 0.10, 0.0008, True),
        (1.12, 0.10, 0.002, False),
    ],
)
def test_healthy_is_what_stays_below_the_border_by_the_whole_interval_or_by_the_clock_too(
    ratio: float, error: float, wait: float, is_healthy: bool
) -> None:
    spread = error / ratio / 4.303 * math.sqrt(3)  # of three logarithms, whose mean has this error
    turns = tuple(ratio * math.exp(spread * each) for each in (-1, 0, 1))
    found = diagnosed(with_ceiling(recorded(steps(wait=wait), [], {}), turns))
    assert found.ceiling is not None
    assert found.ceiling.error == pytest.approx(error, rel=0.05)
    assert found.is_healthy is is_healthy
    assert ("Not waiting for data" in found.verdict) is is_healthy


def test_the_turns_of_all_runs_of_a_repeated_script_count() -> None:
    recording = recorded(steps(), [option(2, num_workers=4)], {1: 2.0, 2: 1.8})
    facts = without_turns(recording)
    again = [each | {"pid": 2} for each in facts if each["fact"] != "trial"]
    alone, both = (
        Recording(facts=facts + more, events=recording.events)
        for more in ([], [{"fact": "again", "pid": 9}, *again, {"fact": "done", "pid": 2}])
    )
    assert len(both.turns) == 2 * len(alone.turns) == 18
    (finding,) = find(both)
    assert finding.gain is not None
    assert finding.gain.ratio == pytest.approx(1.8, rel=0.05)


def test_reads_from_disk_that_more_workers_overlap_are_still_reads_from_disk() -> None:
    recording = recorded(steps(faults=9), [option(2, num_workers=4)], {1: 2.0, 2: 1.8})
    first = find(recording)[0]
    assert (first.id, first.change) == ("cold-reads", "DataLoader(..., num_workers=4)")


def test_reads_from_disk_are_named_first_whichever_change_helps_most() -> None:
    trials = [{"trial": 2, "kind": "warm", "changes": {}}, option(3, num_workers=4)]
    found = find(recorded(steps(faults=9), trials, {1: 2.0, 2: 1.5, 3: 1.8}))
    assert [(each.id, each.change) for each in found] == [("cold-reads", "DataLoader(..., num_workers=4)")]


@pytest.mark.parametrize(("store_wait", "found"), [(0.03, ["slow-store"]), (0.001, [])])
def test_a_store_that_is_too_slow_is_named_with_its_rate_and_latency(store_wait: float, found: list[str]) -> None:
    told = {"fetch": 0.03, "store_wait": store_wait, "store_rate": 4e7, "store_latency": 0.21}
    recording = with_ceiling(recorded(steps(), [], {}, is_plan=True), (3.0, 3.0, 3.0))
    facts = [fact | ({"told": told} if fact["fact"] == "primary" else {}) for fact in recording.facts]
    findings = [each for each in find(replace(recording, facts=facts)) if each.id == "slow-store"]
    assert [each.id for each in findings] == found
    if findings:
        assert "40 MB/s" in findings[0].evidence[1]
        assert "210 ms" in findings[0].evidence[1]


def test_padding_is_found_also_when_nothing_waits() -> None:
    trials = [{"trial": 2, "kind": "grouped", "changes": {}}]
    recording = recorded(steps(wait=0.0001), trials, {1: 1.02, 2: 2.5}, padding=0.7)
    (found,) = find(recording)
    assert found.id == "padding"
    assert found.limit is not None
    assert found.limit.ratio == pytest.approx(1 / 0.3)


def test_ranks_that_wait_for_each_other_are_found_also_when_nothing_waits_for_data() -> None:
    for imbalance, expected in ((1.4, ["unequal-ranks"]), (1.02, []), (None, [])):
        recording = recorded(steps(wait=0.0001), [], {1: 1.0})
        facts = [each | {"imbalance": imbalance} if each["fact"] == "primary" else each for each in recording.facts]
        found = find(replace(recording, facts=facts))
        assert [each.id for each in found] == expected
        assert all("1.40 times" in each.evidence[0] and each.limit is not None for each in found)


def test_a_batch_size_that_computes_faster_is_found_also_when_nothing_waits() -> None:
    recording = recorded(steps(), [option(2, batch_size=32)], {1: 1.0, 2: 1.4}, options={"batch_size": 33})
    assert [each.id for each in find(recording)] == ["odd-batch-size"]


@pytest.mark.parametrize(("growth", "found"), [(4e6, ["growing-workers"]), (0.0, [])])
def test_workers_that_keep_growing_are_found_and_those_that_grew_once_are_not(growth: float, found: list[str]) -> None:
    readings = [
        event(EventKind.MEMORY, float(second), 0.0, worker=worker, value=50e6 * (second > 0) + growth * second)
        for worker in (0, 1)
        for second in range(12)
    ]
    recording = recorded(np.concatenate([steps(), *readings]), [], {1: 1.0})
    assert [each.id for each in find(recording)] == found


@pytest.mark.parametrize(("cpu", "is_proposed"), [(0.03, True), (0.002, False)])
def test_fewer_workers_are_proposed_when_more_are_ready_to_run_than_can(cpu: float, is_proposed: bool) -> None:
    events = steps()
    events["cpu"][events["kind"] == EventKind.FETCH] = cpu
    recording = recorded(events, [], {1: 2.0}, options={"num_workers": 8})
    names = [trial.name for trial in choose_trials(recording, recording.turns, whole_epochs=False, cores=2)]
    assert ("num_workers=2" in names) is is_proposed


def test_workers_are_proposed_to_a_loop_that_has_none_and_nothing_to_one_that_does_not_wait() -> None:
    waiting = recorded(steps(), [], {1: 2.0}, options={"num_workers": 0})
    assert "num_workers=2" in [
        trial.name for trial in choose_trials(waiting, waiting.turns, whole_epochs=False, cores=2)
    ]
    fed = recorded(steps(), [], {1: 1.0}, options={"num_workers": 0})
    assert choose_trials(fed, fed.turns, whole_epochs=False, cores=2) == []


def test_every_page_that_a_finding_names_is_there_with_its_heading() -> None:
    source = Path(doctor.__file__).parent / "_findings.py"
    links = set(re.findall(r'link="([^"]*)"', source.read_text()))
    assert len(links) >= 4
    for link in links:
        path, _, heading = link.partition("#")
        page = Path(__file__).parents[2] / path
        headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
        assert not heading or heading in {
            re.sub(r"[^a-z0-9 -]", "", name.lower()).replace(" ", "-") for name in headings
        }


def test_a_script_that_ends_too_soon_is_not_told_that_nothing_helps() -> None:
    recording = recorded(steps(), [option(2, num_workers=4)], {1: 2.0, 2: 1.8})
    turns = [fact for fact in recording.facts if fact["fact"] == "turn" and fact["trial"] == 2]
    facts = [fact for fact in recording.facts if fact is not turns[-1] and fact["fact"] != "done"]
    (finding,) = find(Recording(facts=facts, events=recording.events))
    assert finding.id == "few-workers"
    assert finding.gain is None
    assert re.fullmatch(r"With x, training was 1\.79 ± 0\.\d\d × faster in 2 turns\.", finding.evidence[1])
    assert finding.evidence[2].startswith("A gain needs 3 turns, and the script ended after 60 steps")


@pytest.mark.parametrize(
    ("fetch", "step", "whole_epochs", "is_tried"),
    [
        (0.0004, 0.01, False, True),
        (0.0004, 0.01, True, False),
        (0.025, 0.01, False, False),
        (0.0004, 0.5, False, False),
    ],
)
def test_doing_without_workers_is_tried_where_batches_cost_less_than_handing_them_over(
    fetch: float, step: float, whole_epochs: bool, is_tried: bool
) -> None:
    recording = recorded(steps(fetch=fetch, step=step), [], {1: 2.0})
    trials = choose_trials(recording, recording.turns, whole_epochs=whole_epochs, cores=2)
    assert ("num_workers=0" in [trial.name for trial in trials]) is is_tried

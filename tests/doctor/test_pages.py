"""What a page of the doctor points at."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from penstock.doctor import Recording, ScriptRun, diagnose, make_page
from penstock.errors import printable
from penstock.machine import EventKind
from penstock.report import render_html, render_terminal, to_perfetto
from report.pages import HOSTILE
from report.test_html import Tags

from .test_findings import option, recorded, run_of, steps


@pytest.mark.parametrize(
    ("wait_of", "expected"),
    [
        (lambda step: 0.2 if step in (7, 10, 11) else 0.0, ((7, 8), (10, 12))),  # a few hold up the others
        (lambda step: 0.2, ((0, 59),)),  # all wait alike
        (lambda step: 0.0001, ()),  # nobody waits
    ],
)
def test_the_steps_of_a_finding_are_those_that_waited(wait_of: Callable[[int], float], expected: object) -> None:
    events = steps()
    is_next = events["kind"] == EventKind.NEXT
    events["duration"][is_next] = [wait_of(step) for step in events["sequence"][is_next]]
    recording = recorded(events, [option(2, num_workers=4)], {1: 2.0, 2: 1.8})
    (finding,) = make_page(diagnose(run_of(recording))).findings
    assert finding.gain is not None
    assert finding.steps == expected


def hostile_run(recording: Recording) -> ScriptRun:
    """A run whose script, loader and errors have names that an enemy chose."""
    notes = [
        {"fact": "failed", "pid": 1, "trial": 2, "reason": HOSTILE},
        {"fact": "not-saved", "pid": 1, "function": HOSTILE, "target": HOSTILE},
        {"fact": "blind", "pid": 1, "reason": HOSTILE},
    ]
    recording = replace(recording, facts=[*recording.facts, *notes])
    return replace(run_of(recording), command=(f"{HOSTILE}.py", HOSTILE))


@pytest.mark.parametrize(("pause", "told"), [(0.6, True), (0.1, False)])
def test_time_for_validation_is_left_out_of_steps_and_the_notes_say_so(pause: float, told: bool) -> None:
    """Two pauses in sixty steps of 0.03 s."""
    events = steps()
    events["start"] += (1e9 * pause * (events["sequence"] // 20)).astype(np.int64)
    found = diagnose(hostile_run(recorded(events, [], {1: 2.0})))
    assert found.case is not None
    assert found.case.costs.wait_share == pytest.approx(0.67, abs=0.1)
    assert any("% of the time went to steps that took over ten times" in note for note in found.notes) == told


@pytest.mark.parametrize("has_loader", [True, False])
def test_what_a_script_is_called_and_says_is_text_on_the_page_and_in_the_terminal(has_loader: bool) -> None:
    trials = [{"trial": 2, "name": HOSTILE, "kind": "rebuild", "changes": {"num_workers": 3}}]
    recording = recorded(steps(slow=0.2), trials, {1: 1.5, 2: 1.4}, where=HOSTILE, context=HOSTILE)
    if not has_loader:
        recording = replace(recording, facts=[])
    page = make_page(diagnose(hostile_run(recording)))
    text = render_html(page)
    assert "document.title" in text  # as text: the names are told
    assert [tag for tag, _ in Tags(text).found if tag in ("img", "a", "iframe", "object")] == []
    assert [given.get("type") for tag, given in Tags(text).found if tag == "script"] == ["application/json", None]
    console = Console(file=io.StringIO(), width=120, color_system=None)
    console.print(render_terminal(page))
    told = console.file.getvalue()  # type: ignore[attr-defined]
    assert printable(told, keep="\n") == told
    json.loads(to_perfetto(page))


def test_the_margin_stands_where_the_gain_does() -> None:
    recording = recorded(steps(), [option(2, num_workers=4)], {1: 2.0, 2: 1.8})
    page = make_page(diagnose(run_of(recording)))
    assert "training was 1.79 ± 0.01 × faster" in page.verdict
    assert "1.99 ± 0.01 ×" in [each.value for each in page.headlines]


@pytest.mark.parametrize(
    ("command", "title"),
    [
        ((sys.executable, "code/train.py", "--lr", "1", "--json"), "penstock doctor · train.py --lr 1 --json"),
        (("torchrun", "--nproc-per-node", "2", "train.py"), "penstock doctor · torchrun --nproc-per-node 2 train.py"),
        (("train.py", *["--more"] * 20), f"penstock doctor · train.py{' --more' * 10} …"),
    ],
)
def test_the_title_names_the_whole_command_or_says_that_it_is_cut(command: tuple[str, ...], title: str) -> None:
    run = hostile_run(recorded(steps(), [], {0: 50}))
    assert make_page(diagnose(replace(run, command=command))).title == title

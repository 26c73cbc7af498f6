"""The last part of `penstock demo`: the doctor on a script that waits for its data, and on one that is fed."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.report import console

if TYPE_CHECKING:
    from penstock.doctor import Diagnosis

_SCRIPT = Path(__file__).with_name("_demo_script.py")
_SECONDS = 10.0
"""Time for each script: about forty turns, of which the ceiling takes seven to thirteen."""


def examine(folder: Path, report: Path | None, *, as_json: bool) -> dict[str, Any]:
    """What the doctor says about the two scripts, and where its page about the one that waits is.

    Args:
        folder: Where the demo's tokenizer and dataset are.
        report: Where to write the page; None chooses a place that outlives the demo.
        as_json: Print nothing.
    """
    from penstock.doctor import make_page
    from penstock.report import render_html, render_terminal

    waiting = _diagnose("texts", folder)
    page = make_page(waiting)
    if not as_json:
        console().print(render_terminal(page))
    fed = _diagnose("prepared", folder)
    if not as_json:
        console().print(f"\nPrepared once, and loaded by Penstock: {fed.verdict}")
    return {
        "texts": waiting.to_json(),
        "prepared": fed.to_json(),
        "report": str(leave_report(report, render_html(page))),
    }


def leave_report(path: Path | None, html: str) -> Path:
    """Write the page; returns its path."""
    if path is None:
        with tempfile.NamedTemporaryFile(prefix="penstock-demo-", suffix=".html", delete=False) as file:
            path = Path(file.name)
    path.write_text(html, encoding="utf-8")
    return path


def _diagnose(data: str, folder: Path) -> Diagnosis:
    from penstock.doctor import DoctorSettings, diagnose, recording_folder, run_script

    words = [sys.executable, str(_SCRIPT), data, str(folder)]
    with recording_folder() as recorded:
        run = run_script(words, DoctorSettings(seconds=_SECONDS), folder=recorded, output_to_stderr=True)
        return diagnose(run)

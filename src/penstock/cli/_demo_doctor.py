"""The last part of `penstock demo`: the doctor on a loader that makes training wait, and on one that does not."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from penstock.report import console

_SECONDS = 10.0
_ENDLESS = 1_000_000


def examine(data: Path, report: Path | None, *, vocabulary: int, as_json: bool) -> dict[str, Any]:
    """What the doctor says of each loader, by name, and where the page about the slow one is.

    Args:
        data: The prepared dataset.
        report: Where to leave the page; None chooses a place that outlives the demo.
        vocabulary: Of the tokenizer.
        as_json: Print nothing.
    """
    from penstock.diagnosis import DoctorSettings, diagnose, make_page, recording_folder, run_script
    from penstock.report import render_html, render_terminal

    said: dict[str, Any] = {}
    for loader in ("slow", "penstock"):
        words = [sys.executable, "-m", "penstock.cli._demo_train", "--data", str(data), "--steps", str(_ENDLESS)]
        words += ["--vocabulary", str(vocabulary), "--loader", loader, "--quiet"]
        with recording_folder() as folder:
            settings = DoctorSettings(seconds=_SECONDS)
            diagnosis = diagnose(run_script(words, settings, folder=folder, output_to_stderr=True))
        page = make_page(diagnosis)
        said[loader] = diagnosis.to_json()["verdict"]
        if not as_json:
            console().print(render_terminal(page) if loader == "slow" else f"With Penstock's loader: {said[loader]}")
        if loader == "slow":
            said["report"] = str(_leave(report, render_html(page)))
    return said


def _leave(report: Path | None, html: str) -> Path:
    if report is None:
        with tempfile.NamedTemporaryFile("w", prefix="penstock-demo-", suffix=".html", delete=False) as file:
            report = Path(file.name)
    report.write_text(html, encoding="utf-8")
    return report

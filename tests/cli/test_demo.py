"""The demo as `make demo` runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.stress
@pytest.mark.timeout(900)
def test_the_demo_resumes_learns_and_leaves_the_doctors_report(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "penstock.cli", "demo", "--json", "--path", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=880)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["resumed_at_the_right_batch"]
    assert result["loss"]["last"] < result["loss"]["first"]
    assert Path(result["doctor"]["report"]) == tmp_path / "report.html"
    assert "<html" in (tmp_path / "report.html").read_text()
    assert result["doctor"]["slow"] != result["doctor"]["penstock"]

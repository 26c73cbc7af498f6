"""The sweep among the examples: the table that people make by hand."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

SWEEP = Path(__file__).parents[2] / "examples" / "sweep.py"


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")
def test_the_sweep_prints_a_line_for_every_setting(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sweep.py", "--epochs", "1", "--workers", "0", "--prefetch", "2"])
    runpy.run_path(str(SWEEP), run_name="__main__")
    header, *rows = capsys.readouterr().out.splitlines()
    names = "num_workers prefetch_factor pin_memory persistent_workers loading_time training_time"
    assert header.split() == names.split()
    assert sorted(row.split()[:3] for row in rows) == [["0", "–", "False"], ["0", "–", "True"]]

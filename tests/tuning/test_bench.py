"""The bench: every line that it promises, for plans and for jobs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock.cli import main

PLAN_JOB = """
import penstock

def make_loader(**options):
    return penstock.DataLoader(penstock.open({data!r}).shuffle(seed=1).batch(8), **options)

def train_step(batch):
    return batch["x"].sum()
"""

JOB = """
import time, torch

def make_loader(**options):
    return range(30)

def train_step(batch):
    time.sleep(0.001)
    return batch
"""


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    with penstock.DatasetWriter(tmp_path / "data", {"x": "int64[64]"}) as writer:
        writer.write_batch({"x": np.arange(64 * 400).reshape(400, 64)})
    (tmp_path / "plan.toml").write_text(penstock.open(tmp_path / "data").shuffle(seed=1).batch(8).to_toml())
    return tmp_path / "plan.toml"


def test_a_plan_is_measured_alone_and_beside_steps_of_given_lengths(plan_file, capsys, tmp_path):
    page = tmp_path / "page.html"
    command = ["bench", str(plan_file), "--steps", "5", "--step-ms", "1", "2"]
    assert main([*command, "--html", str(page)]) == 0
    shown = capsys.readouterr().out
    for part in (
        "batches/s",
        "of the limit",
        "first batch",
        "wait per step",
        "CPU per batch",
        "memory",
        "loader alone",
    ):
        assert part in shown
    assert "with a step of 1 ms" in shown
    assert "plan.read in a loop, one thread" in shown
    assert "copied by one thread, 4.1 kB per batch" in shown
    drawn = page.read_text()
    assert '<th class="">first batch</th>' in drawn
    assert '<td class="">with a step of 2 ms</td>' in drawn
    assert 'id="steps"' in drawn
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [line["name"] for line in found["lines"]] == ["loader alone", "with a step of 1 ms", "with a step of 2 ms"]
    assert found["lines"][2]["limit"] == 500
    assert found["batch_bytes"] == 8 * 64 * 8


def test_a_job_is_measured_beside_its_own_step(tmp_path, capsys):
    (tmp_path / "bench_me.py").write_text(JOB)
    assert main(["bench", str(tmp_path / "bench_me.py"), "--steps", "5", "--step-ms", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [line["name"] for line in found["lines"]] == ["loader alone", "with the job's step"]
    assert 0 < found["lines"][1]["limit"] < 1000


def test_a_job_on_a_plan_has_the_limits_of_a_plan(plan_file, capsys):
    job = plan_file.with_name("on_a_plan.py")
    job.write_text(PLAN_JOB.format(data=str(plan_file.with_name("data"))))
    assert main(["bench", str(job), "--steps", "5", "--step-ms", "--num-workers", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["read_rate"] == found["lines"][0]["limit"] > 0
    assert found["batch_bytes"] == 8 * 64 * 8


def test_bytes_of_a_batch_are_counted_however_it_is_nested(tmp_path, capsys):
    (tmp_path / "nested.py").write_text(JOB.replace("range(30)", "[({'x': torch.zeros(5)}, [torch.zeros(2)])] * 9"))
    assert main(["bench", str(tmp_path / "nested.py"), "--steps", "5", "--step-ms", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["batch_bytes"], found["read_rate"]) == (4 * 7, None)


def test_bad_input_is_told(plan_file, tmp_path, capsys):
    assert main(["bench", str(plan_file), "--steps", "1"]) == 2
    assert main(["bench", str(tmp_path / "nothing.py")]) == 2
    (tmp_path / "empty.py").write_text(JOB.replace("range(30)", "[]"))
    assert main(["bench", str(tmp_path / "empty.py"), "--steps", "3", "--step-ms"]) == 1
    assert "a loader without batches" in capsys.readouterr().err
    (tmp_path / "once.py").write_text(JOB.replace("range(30)", "(x for x in range(6))"))
    assert main(["bench", str(tmp_path / "once.py"), "--steps", "9", "--step-ms"]) == 1
    assert "a loader that ends after batch 6 and cannot start again" in capsys.readouterr().err

"""Tuning a job: what is tried, what comes out, and what happens to jobs that are not as they should be."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import penstock
from penstock.cli import main
from penstock.loader import read_settings

QUICK = {"steps": 3, "rounds": 2}


class Loader:
    """Batches that are ready, or take a while; remembers whether it was closed."""

    made: ClassVar[list[Loader]] = []

    def __init__(self, seconds: float = 0.0, length: int = 4) -> None:
        self.seconds, self.length, self.is_closed = seconds, length, False
        Loader.made.append(self)

    def __iter__(self) -> Any:
        for number in range(self.length):
            time.sleep(self.seconds)
            yield number

    def close(self) -> None:
        self.is_closed = True


def step(batch: int) -> None:
    assert batch >= 0


def test_the_fastest_setting_is_found_and_every_loader_is_closed():
    Loader.made.clear()
    found = penstock.tune(lambda pause: Loader(pause), step, {"pause": (0.02, 0.001, 0.02, 0.03)}, **QUICK)
    assert found.is_complete
    assert found.best.options == {"pause": 0.001}
    assert found.options == {"pause": 0.001}
    assert all(loader.is_closed for loader in Loader.made)
    text = str(found)
    assert "loading_time  training_time" in text
    assert "best, use this" in text
    assert "pause=0.001 gives" in text
    assert "#SBATCH --cpus-per-task=1" in text


def test_batches_that_cost_less_than_handing_them_over_are_made_without_workers():
    def make(num_workers: int) -> Loader:
        return Loader(0.02 if num_workers else 0.001)

    found = penstock.tune(make, lambda batch: time.sleep(0.001), {"num_workers": (0, 1, 2, 3, 4)}, **QUICK)
    assert found.options == {"num_workers": 0}
    (alone,) = (each for each in found.tried if not each.options["num_workers"])
    assert 0 < alone.waiting_share < 1


def test_settings_that_fail_are_reported_and_the_rest_goes_on():
    def make(number: int) -> Loader:
        if number == 1:
            raise OSError("too many open files")
        return Loader(0.001)

    found = penstock.tune(make, step, {"number": (0, 1, 2)}, **QUICK)
    failed = [each for each in found.tried if each.failure]
    assert [(each.options, each.failure) for each in failed] == [({"number": 1}, "OSError: too many open files")]
    assert "1 setting failed" in " ".join(found.notes())
    assert "OSError: too many open files" in str(found)
    assert found.to_json()["tried"][-1] == {"options": {"number": 1}, "failure": "OSError: too many open files"}


def test_when_no_setting_runs_the_first_error_is_told():
    def fail(batch: Any) -> None:
        raise ZeroDivisionError("of the step")

    with pytest.raises(RuntimeError, match="No setting of mine could be run: of the step") as raised:
        penstock.tune(lambda a: Loader(), fail, {"a": (1, 2)}, name="mine", **QUICK)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


def test_an_empty_loader_is_refused():
    with pytest.raises(ValueError, match="a loader without batches"):
        penstock.tune(lambda a: Loader(length=0), step, {"a": (1, 2)}, **QUICK)


def test_a_step_that_takes_no_batch_is_refused_and_one_that_ignores_it_is_remarked_on():
    with pytest.raises(TypeError, match="train_step must take one batch"):
        penstock.tune(lambda a: Loader(), lambda: None, {"a": (1, 2)}, **QUICK)  # type: ignore[arg-type]
    found = penstock.tune(lambda a: Loader(), lambda batch: time.sleep(0.001), {"a": (1, 2)}, **QUICK)
    assert "train_step never uses its batch" in " ".join(found.notes())
    found = penstock.tune(lambda a: Loader(), step, {"a": (1, 2)}, **QUICK)
    assert "never uses" not in " ".join(found.notes())


@pytest.mark.parametrize("in_order", [True, False])
def test_turns_on_a_plan_read_other_rows_each(in_order):
    plan = penstock.from_arrays({"x": np.arange(10_000)}).shuffle(seed=1).batch(10)
    turns: list[list[int]] = []

    def make(**options: Any) -> penstock.DataLoader:
        turns.append([])
        return penstock.DataLoader(plan, in_order=in_order, workers="thread", **options)

    found = penstock.tune(make, lambda batch: turns[-1].extend(batch["x"].tolist()), {"num_workers": (0, 1)}, **QUICK)
    assert len(found.turns) > 2
    rows = [row for turn in turns for row in turn]
    assert (len(set(rows)) == len(rows)) == in_order  # without an order there is no place to go on from


def test_batch_size_counts_samples():
    def make(batch_size: int) -> Loader:
        return Loader(0.001 + 0.0001 * batch_size)

    found = penstock.tune(make, step, {"batch_size": (1, 100)}, **QUICK)
    assert found.options == {"batch_size": 100}


def test_an_interrupt_gives_what_is_known_so_far():
    def interrupt(number: int, *_: Any) -> None:
        if number == 3:
            signal.raise_signal(signal.SIGINT)

    found = penstock.tune(lambda a: Loader(0.001 * a), step, {"a": (5, 1, 3)}, on_turn=interrupt, steps=3, rounds=9)
    assert not found.is_complete
    assert len(found.turns) == 3 - 1
    assert next(found.notes()) == "The search was cut short: this is what is known so far."
    with pytest.raises(KeyboardInterrupt):
        penstock.tune(lambda a: signal.raise_signal(signal.SIGINT), step, {"a": (5, 1, 3)}, **QUICK)


def test_no_turn_but_the_first_begins_after_the_time_is_up():
    found = penstock.tune(lambda a: Loader(0.01), step, {"a": (1, 2, 3)}, seconds=0.001, steps=3, rounds=99)
    assert not found.is_complete
    assert len(found.turns) == 1
    assert found.seconds < 10


@pytest.mark.parametrize(("name", "value"), [("steps", 1), ("rounds", 1), ("seconds", 0), ("seconds", float("nan"))])
def test_a_search_that_could_not_tell_anything_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}={value}"):
        penstock.tune(lambda a: Loader(), step, {"a": (1,)}, **{name: value})


JOB = """
from torch.utils.data import DataLoader
import torch

SPACE = {"num_workers": [0, 1], "prefetch_factor": [2, 4]}

def make_loader(**options):
    return DataLoader(torch.arange(64), batch_size=4, **options)

def train_step(batch):
    return batch.sum()
"""


def test_the_command_prints_the_table_and_writes_the_settings(tmp_path: Path, capsys):
    (tmp_path / "job.py").write_text(JOB)
    settings, page = tmp_path / "found.toml", tmp_path / "page.html"
    command = ["tune", str(tmp_path / "job.py"), "--settings", str(settings), "--steps", "3", "--rounds", "2"]
    assert main([*command, "--html", str(page)]) == 0
    shown = capsys.readouterr().out
    for part in ("num_workers", "loading_time", "training_time", "cores", "memory", "#SBATCH --cpus-per-task="):
        assert part in shown
    assert f"Written to {settings}: penstock.DataLoader(..., settings=" in shown
    assert read_settings(settings).options["num_workers"] in (0, 1)
    assert f"settings='{settings}'" in settings.read_text()
    assert "num_workers" in page.read_text()
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cheapest"]["num_workers"] in (0, 1)
    assert found["is_complete"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file"),
        ("x = 1\n", "has no make_loader() and no train_step()"),
        ("def make_loader(): pass\n", "has no train_step()"),
    ],
)
def test_a_file_that_is_no_job_is_wrong_usage(tmp_path: Path, capsys, text, message):
    path = tmp_path / "odd.py"
    if text is not None:
        path.write_text(text)
    assert main(["tune", str(path)]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert "def train_step(batch):" in told


def test_a_training_script_is_not_run_to_find_that_it_is_no_job(tmp_path: Path, capsys):
    path = tmp_path / "train.py"
    path.write_text(f"open({str(tmp_path / 'trained')!r}, 'w')\n")
    assert main(["tune", str(path)]) == 2
    assert "has no make_loader() and no train_step()" in capsys.readouterr().err
    assert not (tmp_path / "trained").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "import nowhere_to_be_found\n# make_loader, train_step\n",
            'odd.py", line 1, in <module>\n    import nowhere_to_be_found\nModuleNotFound',
        ),
        ("def train_step(batch) return\n# make_loader\n", "SyntaxError: expected ':'"),
        ("def make_loader(**options): pass\ndef train_step(): pass\n", "train_step must take one batch"),
        ("SPACE = {'num_workers': 3}\n" + JOB.replace("SPACE", "_"), "space['num_workers']=3: expected a list"),
    ],
)
@pytest.mark.parametrize("verb", ["tune", "bench"])
def test_a_job_that_cannot_be_taken_is_wrong_usage_and_shows_only_its_own_lines(tmp_path, capsys, verb, text, message):
    (tmp_path / "odd.py").write_text(text)
    assert main([verb, str(tmp_path / "odd.py")]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert "_job.py" not in told


NOISY = """
import argparse, os
print("imported with", argparse.ArgumentParser().parse_args())
os.write(1, b"past Python\\n")

def make_loader(**options):
    print("made")
    return range(9)

def train_step(batch):
    print("stepped")
"""


@pytest.mark.parametrize("verb", ["tune", "bench"])
def test_what_a_job_prints_is_not_in_the_json(tmp_path: Path, capfd, monkeypatch, verb):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["penstock", verb, "noisy.py"])
    Path("noisy.py").write_text(NOISY)
    brief = ["--steps", "3", *(["--rounds", "2"] if verb == "tune" else ["--step-ms"])]
    assert main([verb, "noisy.py", "--json", *brief]) == 0
    out, told = capfd.readouterr()
    assert json.loads(out)["name"] == "noisy.py"
    for line in ("imported with Namespace()", "past Python", "made", "stepped"):
        assert line in told
    assert main([verb, "noisy.py", *brief]) == 0
    assert "stepped" in capfd.readouterr().out


@pytest.mark.parametrize("verb", ["tune", "bench"])
@pytest.mark.parametrize("where", ["import", "step"])
def test_a_job_that_ends_the_process_is_a_failure_like_any_other(tmp_path: Path, capsys, monkeypatch, verb, where):
    monkeypatch.chdir(tmp_path)
    ends = "    __import__('sys').exit('no data')\n"
    text = "def make_loader(**options):\n    return range(9)\ndef train_step(batch):\n" + ends
    Path("ends.py").write_text(text if where == "step" else text + ends.strip())
    brief = ["--steps", "3"] if verb == "tune" else ["--steps", "3", "--step-ms"]
    assert main([verb, "ends.py", "--json", *brief]) == (1 if where == "step" else 2)
    assert "it called sys.exit('no data')" in json.loads(capsys.readouterr().out)["message"]


@pytest.mark.parametrize("option", ["--html", "--settings"])
def test_a_file_that_cannot_be_written_is_refused_before_the_search(tmp_path: Path, capsys, option):
    (tmp_path / "job.py").write_text("raise SystemExit('searches')  # make_loader, train_step")
    for path, message in [("no/such/file", "there is no folder"), (".", "is a folder, not a file to write")]:
        with pytest.raises(SystemExit, match="2"):
            main(["tune", str(tmp_path / "job.py"), option, str(tmp_path / path)])
        assert message in capsys.readouterr().err


def test_a_job_that_fails_while_it_is_measured_shows_its_own_lines(tmp_path: Path, capsys):
    step = "def train_step(batch):\n    return batch.no_such_thing\n"
    (tmp_path / "odd.py").write_text("def make_loader(**options):\n    return range(9)\n" + step)
    assert main(["bench", str(tmp_path / "odd.py"), "--steps", "3", "--step-ms"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("penstock: odd.py could not be measured: 'int' object has no attribute 'no_such_thing'")
    assert 'odd.py", line 4, in train_step' in told
    assert "_bench.py" not in told


def test_when_no_setting_runs_the_command_shows_the_jobs_own_lines(tmp_path: Path, capsys):
    step = "def train_step(batch):\n    return batch.no_such_thing\n"
    (tmp_path / "odd.py").write_text("def make_loader(**options):\n    return range(9)\n" + step)
    assert main(["tune", str(tmp_path / "odd.py"), "--settings", str(tmp_path / "s.toml")]) == 1
    told = capsys.readouterr().err
    assert told.startswith("penstock: No setting of odd.py could be run: 'int' object has no attribute 'no_such_thing'")
    assert 'odd.py", line 4, in train_step' in told
    assert "_turns.py" not in told
    assert not (tmp_path / "s.toml").exists()


def test_what_measuring_costs_is_not_counted_as_the_jobs():
    found = penstock.tune(lambda a: range(100), step, {"a": (1,)}, **QUICK)
    assert 0 < found.best.cores < 1.5  # of one thread

"""The scripts in examples/slurm, run against a stand-in for `srun` that sets the variables as Slurm does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock.loader import read_settings

SCRIPTS = Path(__file__).parents[2] / "examples" / "slurm"

SRUN = """#!{python}
import os, subprocess, sys
words = sys.argv[1:]
tasks = int(os.environ["FAKE_TASKS"])
while words and words[0].startswith("-"):
    name, _, value = words.pop(0).partition("=")
    if name == "--ntasks":
        tasks = int(value)
common = {{"SLURM_STEP_NUM_TASKS": str(tasks), "SLURM_STEP_TASKS_PER_NODE": str(tasks)}}
started = []
for rank in range(tasks):
    own = {{"SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NTASKS": str(tasks)}}
    started.append(subprocess.Popen(words, env=os.environ | common | own))
sys.exit(max(task.wait() for task in started))
"""


@pytest.fixture
def site(tmp_path: Path) -> dict[str, str]:
    """A machine with srun, scontrol and penstock on its path, and a dataset."""
    programs = tmp_path / "bin"
    programs.mkdir()
    fakes = {
        "srun": SRUN.format(python=sys.executable),
        "scontrol": "#!/bin/sh\necho localhost\n",
        "torchrun": f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n',
        "penstock": f'#!/bin/sh\nexec {sys.executable} -m penstock.cli "$@"\n',
        "python": f'#!/bin/sh\nexec {sys.executable} "$@"\n',
    }
    for name, text in fakes.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    with penstock.DatasetWriter(tmp_path / "corpus", {"x": "int64"}) as writer:
        writer.write_batch({"x": np.arange(256)})
    (tmp_path / "scratch").mkdir()
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "RANK", "WORLD_SIZE"))}
    return clean | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "DATA": str(tmp_path / "corpus"),
        "SLURM_TMPDIR": str(tmp_path / "scratch"),
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_CPUS_PER_TASK": "1",
        "FAKE_TASKS": "2",
    }


@pytest.mark.stress
def test_ranks_of_one_node_stage_once_and_read_a_share_each(site):
    command = ["bash", str(SCRIPTS / "one_node.sbatch")]
    done = subprocess.run(command, env=site, cwd=SCRIPTS, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    staged = Path(site["SLURM_TMPDIR"]) / "corpus"
    assert sorted(re.findall(r"rank (\d): 128 rows from (.*)", done.stdout)) == [
        (str(rank), str(staged)) for rank in (0, 1)
    ]
    assert done.stdout.count("and verified in") == 1


@pytest.mark.stress
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_ranks_that_torchrun_starts_read_a_share_each(site, num_nodes):
    tasks = {"SLURM_JOB_NUM_NODES": str(num_nodes), "FAKE_TASKS": str(num_nodes)}
    own = {"SLURM_GPUS_ON_NODE": "2", "SLURM_CPUS_PER_TASK": "2"}
    command = ["bash", str(SCRIPTS / "many_nodes.sbatch")]
    done = subprocess.run(command, env=site | tasks | own, cwd=SCRIPTS, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    shares = sorted(re.findall(r"rank (\d): (\d+) rows from", done.stdout))
    assert shares == [(str(rank), str(128 // num_nodes)) for rank in range(2 * num_nodes)]
    assert done.stdout.count("and verified in") == 1  # all nodes of this test are one machine


@pytest.mark.stress
def test_the_job_that_tunes_writes_settings_and_prints_the_line_for_the_next(site, tmp_path):
    job = """
        import penstock, torch
        SPACE = {"num_workers": [0, 1]}
        def make_loader(**options):
            return penstock.DataLoader(torch.arange(512), batch_size=4, **options)
        def train_step(batch):
            return batch.sum()
    """
    (tmp_path / "job.py").write_text(textwrap.dedent(job))
    command = ["bash", str(SCRIPTS / "tune.sbatch")]
    done = subprocess.run(
        command, env=site | {"FAKE_TASKS": "1"}, cwd=tmp_path, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^#SBATCH --cpus-per-task=\d+$", done.stdout, re.MULTILINE)
    assert "num_workers" in read_settings(tmp_path / "penstock-settings.toml").options


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.sbatch")), ids=lambda path: path.name)
def test_scripts_are_ones_that_bash_and_slurm_read(script):
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0
    lines = script.read_text().splitlines()
    asked = [line for line in lines if line.startswith("#SBATCH")]
    assert lines[0] == "#!/bin/bash"
    assert all(re.match(r"#SBATCH --[a-z-]+=\S+", line) for line in asked)
    assert any("--cpus-per-task=" in line for line in asked)


def scripts() -> list[tuple[str, str]]:
    """(where, text) of what runs `srun`: scripts of the examples, blocks of pages, commands in the help."""
    root = SCRIPTS.parents[1]
    found = [(path.name, path.read_text()) for path in sorted(root.glob("examples/*/*.sbatch"))]
    pages = [root / "README.md", *sorted(root.glob("docs/**/*.md")), *sorted(root.glob("examples/**/*.md"))]
    blocks = [
        (page, block) for page in pages for block in re.findall(r"```[^\n]*\n(.*?)```", page.read_text(), re.DOTALL)
    ]
    return found + [(page.name, block) for page, block in blocks if re.search(r"^srun ", block, re.MULTILINE)]


@pytest.mark.parametrize(("place", "script"), scripts(), ids=[place for place, _ in scripts()])
def test_srun_is_told_how_many_processors_a_task_gets_and_staging_how_many_processes(place, script):
    is_exported = "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK" in script
    for line in re.findall(r"^srun (?:.*\\\n)*.*$", script, re.MULTILINE):
        if "penstock stage" in line:
            assert re.match(r'srun --ntasks="?\$SLURM_JOB_NUM_NODES"? --ntasks-per-node=1 ', line)
        else:
            assert is_exported or "--cpus-per-task=" in line, f"{place}: {line}"


def test_without_a_dataset_a_script_says_what_it_needs(site):
    del site["DATA"]
    done = subprocess.run(["bash", str(SCRIPTS / "one_node.sbatch")], env=site, capture_output=True, text=True)
    assert done.returncode != 0
    assert "is the dataset: sbatch" in done.stderr

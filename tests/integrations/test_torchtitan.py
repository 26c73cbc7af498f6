"""torchtitan's own trainer over a plan: killed, and resumed on other numbers of ranks. Needs torchtitan and triton."""

from __future__ import annotations

import importlib.util
import json
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

import penstock
from penstock.plan import Plan

pytestmark = [
    pytest.mark.stress,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("torchtitan", "triton")),
        reason="torchtitan is not installed: pip install torchtitan triton",
    ),
]
SCRIPT = Path(__file__).parent / "scripts" / "titan.py"
ROWS_PER_STEP = 8


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Plans to train and to validate on, and the tokenizer that torchtitan wants to find."""
    import tokenizers

    generator = np.random.default_rng(0)
    with penstock.DatasetWriter(tmp_path / "data", {"tokens": "uint16[*]"}) as writer:
        for length in generator.integers(5, 100, 300):
            writer.write({"tokens": generator.integers(1, 2000, length).astype(np.uint16)})
    ds = penstock.open(tmp_path / "data")
    (tmp_path / "train.toml").write_text(ds.shuffle(seed=7).pack(64).to_toml())
    (tmp_path / "validation.toml").write_text(ds.pack(64).take(rows=11).to_toml())
    (tmp_path / "tokenizer").mkdir()
    words = tokenizers.models.WordLevel({"?": 0}, unk_token="?")
    tokenizers.Tokenizer(words).save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    return tmp_path


def train(folder: Path, world_size: int, steps: int, *options: str, kill_after: int | None = None) -> str:
    """What torchrun prints; the run is killed as soon as the checkpoint of a step is there."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"]
    command += [str(SCRIPT), str(folder), str(steps), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if kill_after is not None and re.search(rf"step: +{kill_after + 1} ", line):
                for each in (*psutil.Process(process.pid).children(recursive=True), process):
                    each.kill()
    text = "".join(said)
    assert process.returncode == (0 if kill_after is None else -signal.SIGKILL), text[-5000:]
    return text


def taken(folder: Path) -> dict[int, list[list[int]]]:
    """The rows of every step that all ranks took since the last look, in an order of their own."""
    steps: dict[int, list[list[int]]] = {}
    for path in folder.glob("rank*.jsonl"):
        for step, rows in map(json.loads, path.read_text().splitlines()):
            steps.setdefault(step, []).extend(rows)
        path.unlink()
    return {step: sorted(rows) for step, rows in steps.items()}


def rows_of(plan: Plan, step: int) -> list[list[int]]:
    """Those that the plan says a step, counted from 1, is made of."""
    return sorted(plan.read_at((step - 1) * ROWS_PER_STEP)["input_ids"].tolist())


def saved_step(folder: Path) -> int:
    """The last step with a whole checkpoint; 0 if there is none."""
    found = (folder / "checkpoint").glob("step-*/.metadata")
    return max((int(path.parent.name.removeprefix("step-")) for path in found), default=0)


def test_killed_runs_go_on_with_other_numbers_of_ranks_at_the_exact_next_row(folder: Path) -> None:
    plan = penstock.load_plan(folder / "train.toml").batch(ROWS_PER_STEP)
    done = 0
    for world_size in (1, 2, 4, 1):
        train(folder, world_size, 100, kill_after=done + random.randint(2, 4))
        found, before, done = taken(folder), done, saved_step(folder)
        assert min(found) == before + 1
        for step in range(before + 1, done + 1):
            assert found[step] == rows_of(plan, step), (world_size, step)
        print(f"{world_size} ranks: steps {before + 1} to {done} have the plan's rows")


def test_context_parallel_ranks_share_rows(folder: Path) -> None:
    rows = penstock.open(folder / "data").shuffle(seed=7).pack(256)  # torch cuts masks in blocks of 128 for each rank
    (folder / "train.toml").write_text(rows.to_toml())
    plan = rows.batch(ROWS_PER_STEP)
    train(folder, 2, 2, "--context", "2", "--length", "256")
    found = taken(folder)
    assert found == {step: sorted(2 * rows_of(plan, step)) for step in (1, 2)}  # each rank has all of them


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_trainer_validates_on_all_of_a_plan(folder: Path, world_size: int) -> None:
    assert re.search(r"validate step: +1 .*?loss: +[0-9.]+", train(folder, world_size, 1, "--validate"))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_one_pass_has_every_row_once_and_as_many_batches_for_each_rank(folder: Path, world_size: int) -> None:
    from penstock.integrations.torchtitan import PlanDataLoader

    config = PlanDataLoader.Config(plan=str(folder / "validation.toml"), infinite=False)
    loaders = [
        config.build(dp_world_size=world_size, dp_rank=rank, tokenizer=None, seq_len=64, local_batch_size=2)
        for rank in range(world_size)
    ]
    batches = [list(loader) for loader in loaders]
    assert len({len(each) for each in batches}) == 1
    pairs = [pair for each in batches for inputs, labels in each for pair in zip(inputs["input"], labels, strict=True)]
    found = [row.tolist() for row, labels in pairs if (labels != -100).any()]
    plan = penstock.load_plan(folder / "validation.toml").batch(11)
    assert sorted(found) == sorted(plan.read(0)["input_ids"].tolist())
    for loader in loaders:
        loader.close()

"""Frameworks resume by rebuilding a loader without its first batches; a plan's loader goes there at once."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accelerate import Accelerator, skip_first_batches
from torch.utils.data import DataLoader as TorchDataLoader

import penstock
from penstock.plan import Plan
from pytorch.examples import documents, expected, fine_tuning_loader, numbers, plain_batch, received

SCRIPTS = Path(__file__).parent / "scripts"
LOADERS: dict[str, Any] = {
    "carried": lambda: penstock.DataLoader(numbers(26).shuffle(seed=1).batch(4), num_workers=1),
    "short": lambda: penstock.DataLoader(numbers(26).shuffle(seed=1).batch(4, tail="short"), num_workers=0),
    "dropped": lambda: penstock.DataLoader(numbers(26).batch(4, tail="drop"), num_workers=2),
    "packed": lambda: penstock.DataLoader(documents(60).shuffle(seed=1).pack(32).batch(4), num_workers=1),
    "by tokens": lambda: penstock.DataLoader(documents(60).shuffle(seed=1).pad().batch(tokens=96, multiple=2)),
    "in parts by tokens": lambda: penstock.DataLoader(
        documents(60).shuffle(seed=1).pad().batch(tokens=256, multiple=8, balance="attention"), micro_batch=2
    ),
    "in parts": lambda: penstock.DataLoader(numbers(24).shuffle(seed=1).batch(8), micro_batch=2),
    "two epochs": lambda: penstock.DataLoader(numbers(26).shuffle(seed=1).batch(4), epochs=2),
    "a dataset": lambda: penstock.DataLoader(numbers(26), batch_size=4, shuffle=True, num_workers=1),
}


@pytest.mark.parametrize("name", LOADERS)
def test_accelerate_skips_to_any_batch_of_any_epoch(name: str) -> None:
    straight = LOADERS[name]()
    epochs = [received(straight) for _ in range(3)]
    for epoch, num_skipped in ((0, 0), (0, 3), (1, 1), (1, 5)):
        loader = LOADERS[name]()
        loader.set_epoch(epoch * loader.epochs)
        skipped = skip_first_batches(loader, num_skipped)
        assert len(skipped) == len(epochs[epoch]) - num_skipped
        assert received(skipped) == epochs[epoch][num_skipped:]
        assert received(loader) == epochs[epoch + 1]


def test_no_batch_before_the_first_one_asked_for_is_computed() -> None:
    read: list[int] = []

    def note(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        read.append(int(row["x"]))
        return row

    loader = penstock.DataLoader(numbers(40).map(note).batch(4), num_workers=0)
    next(iter(skip_first_batches(loader, 7)))
    assert read == [28, 29, 30, 31]


def test_the_state_counts_what_the_rebuilt_loader_hands_over() -> None:
    plan = numbers(24).shuffle(seed=1).batch(4)
    loader = penstock.DataLoader(plan, num_workers=1)
    batches = iter(skip_first_batches(loader, 2))
    assert [plain_batch(next(batches)) for _ in range(2)] == expected(plan)[2:4]
    again = penstock.DataLoader(plan, num_workers=0)
    again.load_state_dict(loader.state_dict())
    assert received(again) == expected(plan)[4:]


def test_a_rebuilt_loader_does_not_need_the_one_it_was_built_from() -> None:
    plan = numbers(24).shuffle(seed=1).batch(4)
    skipped = skip_first_batches(penstock.DataLoader(plan, num_workers=1), 4)
    gc.collect()
    assert received(skipped) == expected(plan)[4:]


@pytest.mark.parametrize("name", ["carried", "in parts", "a dataset"])
def test_torchs_loader_rebuilt_with_workers_of_its_own_reads_the_same_batches(name: str) -> None:
    loader = LOADERS[name]()
    rebuilt: TorchDataLoader[Any] = TorchDataLoader(
        loader.dataset, batch_sampler=loader.batch_sampler, collate_fn=loader.collate_fn, num_workers=2
    )
    assert received(rebuilt) == received(LOADERS[name]())


@pytest.mark.parametrize("skips", [False, True])
def test_accelerate_saves_and_loads_the_state_of_a_plans_loader(tmp_path: Path, skips: bool) -> None:
    plan = numbers(26).shuffle(seed=1).batch(4)
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(penstock.DataLoader(plan, num_workers=0))
    straight = [received(loader)]
    for _, _ in zip(range(2), loader, strict=False):
        pass
    accelerator.save_state(str(tmp_path))
    again = Accelerator(cpu=True)
    resumed = again.prepare(penstock.DataLoader(plan, num_workers=0))
    again.load_state(str(tmp_path))
    rest = received(again.skip_first_batches(resumed, 2) if skips else resumed)
    assert rest == expected(plan, epoch=1)[2:]
    assert straight == [expected(plan)]
    assert received(resumed) == expected(plan, epoch=2)


@pytest.mark.timeout(600)
def test_transformers_resumes_in_mid_epoch_at_the_next_batch(tmp_path: Path) -> None:
    for name, (straight, stopped) in trained(tmp_path, 1, ["carry", "parts", "dataset", "stream", "torch"]).items():
        assert stopped == straight, name
        assert len(straight) in (18, 20)


@pytest.mark.stress
@pytest.mark.timeout(600)
def test_transformers_resumes_on_two_processes(tmp_path: Path) -> None:
    runs = trained(tmp_path, 2, ["carry", "dataset"])
    for name, (straight, stopped) in runs.items():
        assert stopped == straight, name
    for kind, num_rows in (("carry", 26), ("dataset", 24)):
        first, second = (np.ravel(runs[f"{kind}-{rank}"][1]) for rank in range(2))
        rows = np.concatenate([first, second])
        assert set(np.bincount(rows, minlength=num_rows)) <= {3, 4}  # three epochs, and what the last batch carries


def trained(folder: Path, num_ranks: int, kinds: list[str]) -> dict[str, list[list[list[int]]]]:
    """What scripts/trainer.py noted, by kind and rank."""
    (folder / "numbers.jsonl").write_text("".join(f'{{"x": {number}}}\n' for number in range(24)))
    done = run("trainer.py", num_ranks, folder, *kinds)
    assert done.returncode == 0, done.stderr
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def run(script: str, num_ranks: int, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    port = str(29500 + os.getpid() % 2000)
    launch = ["-m", "torch.distributed.run", f"--nproc_per_node={num_ranks}", "--master_port", port]
    tests = str(Path(__file__).parents[1])
    command = [sys.executable, *(launch if num_ranks > 1 else []), str(SCRIPTS / script), tests, str(folder), *words]
    return subprocess.run(command, timeout=590, capture_output=True, text=True)


@pytest.mark.stress
@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("kind", ["packed", "dataset"])
@pytest.mark.parametrize("script", ["sft.py", "fit.py"], ids=["TRL", "Lightning"])
def test_a_killed_training_resumes_at_the_batch_after_its_checkpoint(
    script: str, kind: str, num_ranks: int, tmp_path: Path
) -> None:
    killed, resumed = (run(script, num_ranks, tmp_path, kind, phase) for phase in ("killed", "resumed"))
    assert killed.returncode != 0
    assert resumed.returncode == 0, resumed.stderr
    for rank in range(num_ranks):
        first, second = (notes(tmp_path / f"{kind}-{phase}-{rank}.jsonl") for phase in ("killed", "resumed"))
        loader = fine_tuning_loader(kind, num_ranks, rank)
        straight = [batch["input_ids"].tolist() for _ in range(2) for batch in loader]
        assert len(first) == 10, "it was killed two batches after its checkpoint"
        assert first[:8] + second == straight


def notes(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_plans_answer_to_anything_else_than_a_whole_batch_is_an_error() -> None:
    plan: Plan = numbers(8).batch(4)
    with pytest.raises(AttributeError):
        list(TorchDataLoader(plan, sampler=[0, 1]))  # type: ignore[arg-type]

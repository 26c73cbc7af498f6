"""The Trainer, Lightning and DDP train on batches that are dealt by cost, and on batches of any number of rows."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.plan import Plan

from .frameworks import note_inputs, shared_plans, steps_of, tiny_llama

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's and the frameworks' own
KINDS = list(shared_plans())
SCRIPT = Path(__file__).parent / "scripts" / "shared.py"


@pytest.fixture(scope="module")
def trainers() -> Any:
    return importlib.import_module("integrations.trainer_runs")


@pytest.fixture(scope="module")
def lightning() -> Any:
    return importlib.import_module("integrations.lightning_runs")


@pytest.mark.parametrize("kind", KINDS)
def test_the_trainer_takes_whole_steps_and_resumes_at_the_next(tmp_path: Path, kind: str, trainers: Any) -> None:
    plan, seen = shared_plans()[kind], []
    stopped = plan.num_batches() + 2  # in the second epoch
    for callbacks in ([trainers.Stop(stopped)], []):
        model = tiny_llama()
        inputs = note_inputs(model)
        settings = trainers.arguments(
            tmp_path, max_steps=stopped + 4, save_strategy="steps", save_steps=stopped,
            per_device_train_batch_size=plan.global_size,
        )  # fmt: skip
        trainer = trainers.Trainer(model, settings, train_dataset=plan, callbacks=callbacks)
        trainer.train(resume_from_checkpoint=bool(seen))
        seen += inputs
    assert seen == steps_of(plan, stopped + 4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_trainers_pieces_of_a_step_are_its_rows(tmp_path: Path, kind: str, trainers: Any) -> None:
    plan, model = shared_plans()[kind], tiny_llama()
    seen = note_inputs(model)
    settings = trainers.arguments(
        tmp_path, max_steps=3, per_device_train_batch_size=plan.global_size // 2, gradient_accumulation_steps=2
    )
    trainer = trainers.Trainer(model, settings, train_dataset=plan)
    trainer.train()
    assert trainer.state.global_step == 3
    pieces, row = [], 0
    for _ in range(3):
        pieces += [plan.read_at(row, part=part, num_parts=2)["input_ids"].ravel().tolist() for part in range(2)]
        row = plan.steps.next_row(row)
    assert seen == pieces


def test_what_the_trainer_multiplies_must_be_the_multiple_of_token_batches(tmp_path: Path, trainers: Any) -> None:
    plan = shared_plans()["as many as fit"]
    settings = trainers.arguments(tmp_path, gradient_accumulation_steps=3)
    with pytest.raises(ValueError, match=r"plan's batches have a multiple of 4 rows.* Use .*tokens=..., multiple=12"):
        trainers.Trainer(tiny_llama(), settings, train_dataset=plan).train()


@pytest.mark.parametrize("kind", KINDS)
def test_lightning_takes_whole_steps_and_resumes_at_the_next(tmp_path: Path, kind: str, lightning: Any) -> None:
    plan = shared_plans()[kind]
    first, second = lightning.Noting(), lightning.Noting()
    stopped = plan.num_batches() + 2
    for model, steps in ((first, stopped), (second, stopped + 4)):
        lightning.fit(tmp_path, model, lightning.DataModule(train=plan, num_workers=0), steps=steps)
    assert first.seen + second.seen == steps_of(plan, stopped + 4)


@pytest.mark.parametrize("kind", KINDS)
def test_an_evaluation_counts_every_target_once_whatever_a_batch_holds(
    tmp_path: Path, kind: str, trainers: Any
) -> None:
    plan = shared_plans(tail="even")[kind]
    whole = Plan(plan.source, plan.stages[:-1]).batch(plan.num_rows, tail="even")
    trainer = trainers.Trainer(tiny_llama(), trainers.arguments(tmp_path), train_dataset=plan)
    assert trainer.evaluate(plan)["eval_loss"] == pytest.approx(trainer.evaluate(whole)["eval_loss"], rel=1e-6)


def run(folder: Path, kind: str, world_size: int, begin: int, end: int) -> list[dict[str, Any]]:
    port = str(29500 + os.getpid() % 2000)
    launch = ["-m", "torch.distributed.run", f"--nproc_per_node={world_size}", "--master_port", port]
    command = [sys.executable, *launch, str(SCRIPT), str(folder), kind, str(begin), str(end)]
    subprocess.run(command, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
    return [json.loads((folder / f"{kind}-{begin}-{rank}.json").read_text()) for rank in range(world_size)]


@pytest.mark.stress
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_of_ddp_have_equal_steps_and_go_on_with_another_number_of_them(tmp_path: Path, kind: str) -> None:
    plan = shared_plans()[kind]
    found = {2: run(tmp_path, kind, 2, 0, 5), 4: run(tmp_path, kind, 4, 5, 9)}
    row = 0
    for world_size, step in [(2, step) for step in range(5)] + [(4, step) for step in range(4)]:
        ranks = found[world_size]
        for rank, each in enumerate(ranks):
            expected = plan.read_at(row, rank, world_size)["input_ids"]
            assert list(itertools.chain(*each["rows"][step])) == expected.ravel().tolist()
        assert len({each["losses"][step] for each in ranks}) == 1
        row = plan.steps.next_row(row)
    assert [len(each["rows"]) for world_size in (2, 4) for each in found[world_size]] == [5, 5, 4, 4, 4, 4]

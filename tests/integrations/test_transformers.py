"""The Trainer of transformers and the SFTTrainer of TRL take plans as they are."""

from __future__ import annotations

import importlib
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.plan import Plan

from .frameworks import VOCABULARY, documents, expected, note_inputs, packed, tiny_llama, tiny_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's and transformers' own


@pytest.fixture(scope="module")
def runs() -> Any:
    """Trainers of transformers, which takes seconds to import: not where these tests are only collected."""
    return importlib.import_module("integrations.trainer_runs")


def test_packed_and_padded_batches_give_the_loss_of_their_documents_alone(runs: Any) -> None:
    model, data = tiny_llama().eval(), documents()
    rows = [getattr(data, verb)(32, labels=labels) for verb in ("pack", "pad") for labels in ("next", "same")]
    for plan in rows:
        (batch,) = runs.ModelLoader(plan.batch(plan.num_rows), num_workers=0)
        with torch.no_grad():
            packed_loss = model(**batch).loss.item()
        losses, weights = [], []
        for document in range(len(data)):
            tokens = torch.from_numpy(data[document]["tokens"].astype("int64"))[None]
            with torch.no_grad():
                losses.append(model(input_ids=tokens, labels=tokens).loss.item())
            weights.append(tokens.shape[1] - 1)
        alone = sum(loss * weight for loss, weight in zip(losses, weights, strict=True)) / sum(weights)
        assert packed_loss == pytest.approx(alone, rel=1e-5)


def test_token_windows_have_the_labels_that_the_model_shifts(runs: Any) -> None:
    plan = documents().window(16).batch(4)
    assert plan.labels == "next"
    batch = next(iter(runs.ModelLoader(plan, num_workers=0)))
    assert set(batch) == {"input_ids", "labels"}
    assert (batch["labels"][:, 0] == -100).all()
    assert torch.equal(batch["labels"][:, 1:], batch["input_ids"][:, 1:])


def test_batches_of_samples_go_to_the_model_as_they_are(runs: Any) -> None:
    batch = {"pixel_values": torch.zeros(2, 3), "labels": torch.tensor([0, 1])}
    assert runs.model_arguments(batch, labels=None) == batch
    assert documents().batch(2).labels is None


@pytest.mark.parametrize("stopped", [pytest.param(4, marks=pytest.mark.stress), 12])
def test_the_trainer_resumes_at_the_next_batch_in_any_epoch(tmp_path: Path, stopped: int, runs: Any) -> None:
    plan, seen = packed(), []
    for callbacks in ([runs.Stop(stopped)], []):
        model = tiny_llama()
        inputs = note_inputs(model)
        settings = runs.arguments(tmp_path, max_steps=15, save_strategy="steps", save_steps=stopped)
        trainer = runs.Trainer(model, settings, train_dataset=plan, callbacks=callbacks)
        trainer.train(resume_from_checkpoint=bool(seen))
        seen += inputs
    assert seen == expected(plan, 15)


def test_a_step_is_the_plans_batch_also_in_pieces(tmp_path: Path, runs: Any) -> None:
    plan, model = packed(8), tiny_llama()
    seen = note_inputs(model)
    settings = runs.arguments(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=3)
    runs.Trainer(model, settings, train_dataset=plan).train()
    assert [list(itertools.chain(*seen[4 * step : 4 * step + 4])) for step in range(3)] == expected(plan, 3)


def test_a_batch_that_is_not_a_step_of_the_trainer_is_refused(tmp_path: Path, runs: Any) -> None:
    settings = runs.arguments(tmp_path, gradient_accumulation_steps=2)
    with pytest.raises(
        ValueError, match=r"has 4 rows, a step of the Trainer 8: .* Use per_device.*=2 or plan.batch\(8"
    ):
        runs.Trainer(tiny_llama(), settings, train_dataset=packed()).train()


def test_a_loader_of_ones_own_must_hand_out_the_pieces_that_the_trainer_counts(tmp_path: Path, runs: Any) -> None:
    plan = packed(8)
    settings = runs.arguments(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=1)
    with pytest.raises(ValueError, match=r"micro_batch=None .* Use ModelLoader\(plan, micro_batch=2, steps="):
        runs.Trainer(tiny_llama(), settings, train_dataset=runs.ModelLoader(plan, num_workers=0)).get_train_dataloader()
    fits = runs.ModelLoader(plan, num_workers=0, micro_batch=2, steps=plan.num_batches())
    assert runs.Trainer(tiny_llama(), settings, train_dataset=fits).get_train_dataloader() is fits


def test_several_gpus_in_one_process_are_refused(tmp_path: Path, runs: Any) -> None:
    trainer = runs.Trainer(tiny_llama(), runs.arguments(tmp_path), train_dataset=packed())
    trainer.args._n_gpu = 2
    with pytest.raises(ValueError, match="2 GPUs in one process"):
        trainer.get_train_dataloader()


def test_what_the_loader_measured_is_logged_beside_the_loss(tmp_path: Path, runs: Any) -> None:
    trainer = runs.Trainer(tiny_llama(), runs.arguments(tmp_path, max_steps=2, logging_steps=1), train_dataset=packed())
    trainer.train()
    first, *_ = trainer.state.log_history
    assert {"loss", "data/wait_share", "data/wait_seconds"} <= set(first)


def test_evaluation_takes_plans_by_name_and_gives_each_its_loss(tmp_path: Path, runs: Any) -> None:
    plans: dict[str, Plan] = {
        "packed": documents().pack(32).batch(4, tail="even"),
        "windows": documents().window(16).batch(4, tail="even"),
    }
    trainer = runs.Trainer(tiny_llama(), runs.arguments(tmp_path), train_dataset=packed(), eval_dataset=plans)
    found = trainer.evaluate()
    for name in plans:
        assert found[f"eval_{name}_loss"] == pytest.approx(math.log(VOCABULARY), abs=0.1)
    assert trainer.evaluate(plans["packed"])["eval_loss"] == pytest.approx(found["eval_packed_loss"])


@pytest.mark.parametrize("verb", ["pack", "pad", "window"])
def test_the_loss_of_an_evaluation_is_the_mean_over_targets_not_over_batches(
    tmp_path: Path, verb: str, runs: Any
) -> None:
    rows = getattr(documents(), verb)(32)
    trainer = runs.Trainer(tiny_llama(), runs.arguments(tmp_path), train_dataset=packed())
    whole = trainer.evaluate(rows.batch(rows.num_rows, tail="even"))["eval_loss"]
    uneven = rows.batch(rows.num_rows - 1, tail="even")  # the last batch has one row
    assert trainer.evaluate(uneven)["eval_loss"] == pytest.approx(whole, rel=1e-6)
    assert trainer.predict(uneven).metrics["test_loss"] == pytest.approx(whole, rel=1e-6)


def test_a_row_that_comes_twice_in_an_evaluation_has_labels_once(tmp_path: Path, runs: Any) -> None:
    plan = documents().pack(32).batch(4, tail="even")  # 22 rows: the last batch has too few for four ranks
    loaders = [runs.ModelLoader(plan, num_workers=0, rank=rank, world_size=4) for rank in range(4)]
    trainer = runs.Trainer(tiny_llama(), runs.arguments(tmp_path), train_dataset=packed())
    batches = [batch for loader in loaders for batch in trainer.get_eval_dataloader(loader)]
    num_targets = sum(int((batch["labels"] != -100).sum()) for batch in batches)
    counted = plan.ledger().packing
    assert counted is not None
    assert sum(batch["input_ids"].numel() for batch in batches) > 22 * 32
    assert num_targets == counted.num_tokens - counted.num_pieces


def test_a_trainer_without_plans_is_the_frameworks_own(tmp_path: Path, runs: Any) -> None:
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 8
    trainer = runs.Trainer(tiny_llama(), runs.arguments(tmp_path, max_steps=1), None, rows, rows)
    trainer.train()
    assert trainer.train_dataset is rows
    assert not isinstance(trainer.get_train_dataloader(), penstock.DataLoader)
    assert "eval_loss" in trainer.evaluate()


@pytest.mark.parametrize("by_name", [True, False])
def test_trainers_that_pass_arguments_on_take_plans(tmp_path: Path, by_name: bool, runs: Any) -> None:
    plan, model, settings = packed(), tiny_llama(), runs.arguments(tmp_path, max_steps=2)
    seen = note_inputs(model)
    if by_name:
        trainer = runs.ScaledTrainerOfPlans(model=model, args=settings, train_dataset=plan, scale=0.5)
    else:
        trainer = runs.ScaledTrainerOfPlans(model, settings, None, plan, {"packed": plan}, scale=0.5)
    trainer.train()
    assert (trainer.scale, seen) == (0.5, expected(plan, 2))
    assert by_name or "eval_packed_loss" in trainer.evaluate()


def test_trl_trains_on_the_plans_batches_and_resumes_at_the_next(tmp_path: Path, runs: Any) -> None:
    from trl import SFTConfig

    from penstock.integrations.trl import SFTTrainer

    plan, seen = packed(), []
    for callbacks in ([runs.Stop(8)], []):
        model = tiny_llama()
        inputs = note_inputs(model)
        settings = runs.arguments(
            tmp_path, SFTConfig, max_steps=10, save_strategy="steps", save_steps=8, bf16=False,
            gradient_checkpointing=False,
        )  # fmt: skip
        trainer = SFTTrainer(
            model, settings, train_dataset=plan, eval_dataset=documents().pack(32).batch(4, tail="even"),
            processing_class=tiny_tokenizer(), callbacks=callbacks,
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=bool(seen))
        seen += inputs
    assert seen == expected(plan, 10)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(math.log(VOCABULARY), abs=0.1)
    assert trainer.evaluate(documents().pack(16).batch(4, tail="even"))["eval_loss"] > 0


def test_trl_trains_and_evaluates_on_token_windows(tmp_path: Path, runs: Any) -> None:
    from trl import SFTConfig

    from penstock.integrations.trl import SFTTrainer

    windows, model = documents().window(16), tiny_llama()
    plan, evaluated = windows.batch(4), windows.take(rows=4).batch(4, tail="even")
    seen = note_inputs(model)
    settings = runs.arguments(
        tmp_path, SFTConfig, max_steps=2, bf16=False, gradient_checkpointing=False, logging_steps=1
    )
    trainer = SFTTrainer(model, settings, train_dataset=plan, eval_dataset=evaluated, processing_class=tiny_tokenizer())
    trainer.train()
    assert seen == expected(plan, 2)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(math.log(VOCABULARY), abs=0.1)
    assert [line["num_tokens"] for line in trainer.state.log_history if "loss" in line] == [64, 128]

"""Train with a framework, saving every 3 steps; in mode "killed" end with SIGKILL in step 13, in mode "resumed" go on.

    killed.py FRAMEWORK FOLDER MODE

Each batch that was trained on is a line of FOLDER/<mode>-<rank>.jsonl, written before the step is done.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")

import torch
import transformers

import penstock
from integrations.frameworks import packed, tiny_llama, tiny_tokenizer, versions

warnings.filterwarnings("ignore")
FRAMEWORK, FOLDER, MODE = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
RANK, WORLD_SIZE = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
STEPS, EVERY, KILLED_IN = 20, 3, 13


def note(step: int, tokens: torch.Tensor) -> None:
    """Write down what is trained on; end here if this is the step."""
    with (FOLDER / f"{MODE}-{RANK}.jsonl").open("a") as file:
        file.write(json.dumps(tokens.ravel().tolist()) + "\n")
    if MODE == "killed" and step == KILLED_IN:
        os.kill(os.getpid(), signal.SIGKILL)


def with_trainer(kind: Any, arguments_kind: Any, **others: Any) -> None:
    arguments = arguments_kind(
        output_dir=str(FOLDER), max_steps=STEPS, save_strategy="steps", save_steps=EVERY, report_to=[], use_cpu=True,
        disable_tqdm=True, per_device_train_batch_size=4 // WORLD_SIZE, **others,
    )  # fmt: skip
    model = tiny_llama()
    extra = {"processing_class": tiny_tokenizer()} if FRAMEWORK == "trl" else {}
    trainer = kind(model, arguments, train_dataset=packed(), **extra)
    model.register_forward_pre_hook(
        lambda module, args, kwargs: note(trainer.state.global_step, kwargs["input_ids"]), with_kwargs=True
    )
    trainer.train(resume_from_checkpoint=MODE == "resumed")


def with_transformers() -> None:
    from penstock.integrations.transformers import Trainer

    with_trainer(Trainer, transformers.TrainingArguments)


def with_trl() -> None:
    from trl import SFTConfig

    from penstock.integrations.trl import SFTTrainer

    with_trainer(SFTTrainer, SFTConfig, bf16=False, gradient_checkpointing=False)


def with_lightning() -> None:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    from penstock.integrations.lightning import DataModule

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            note(self.global_step, batch["input_ids"])
            return self.weight.sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    trainer = lightning.Trainer(
        max_steps=STEPS, max_epochs=-1, accelerator="cpu", devices=WORLD_SIZE, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[ModelCheckpoint(FOLDER, every_n_train_steps=EVERY, save_last=True)],
    )  # fmt: skip
    checkpoint = FOLDER / "last.ckpt" if MODE == "resumed" else None
    trainer.fit(Model(), DataModule(train=packed(), num_workers=1), ckpt_path=checkpoint)


def with_accelerate() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), penstock.DataLoader(packed(), epochs=None, num_workers=1)
    )
    step = 0
    if MODE == "resumed":
        saved = max(int(path.name) for path in (FOLDER / "states").iterdir())
        accelerator.load_state(str(FOLDER / "states" / str(saved)))
        step = saved
    for batch in loader:
        note(step, batch["input_ids"])
        accelerator.backward(model(torch.ones(1)).sum())
        optimizer.step()
        step += 1
        if step % EVERY == 0:
            accelerator.save_state(str(FOLDER / "states" / str(step)))
        if step == STEPS:
            break


if __name__ == "__main__":
    print(versions())
    {"transformers": with_transformers, "trl": with_trl, "lightning": with_lightning, "accelerate": with_accelerate}[
        FRAMEWORK
    ]()

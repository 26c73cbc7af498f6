"""Train with Lightning: killed in mid-epoch, or resumed after that.

    fit.py TESTS FOLDER KIND PHASE      KIND: packed, dataset      PHASE: killed, resumed

Appends the tokens of each batch, when the model is given it, to FOLDER/<kind>-<phase>-<rank>.jsonl.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, sys.argv[1])
os.environ.update(CUDA_VISIBLE_DEVICES="")

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from pytorch.examples import fine_tuning_loader

FOLDER, KIND, PHASE = Path(sys.argv[2]), *sys.argv[3:]
EPOCHS, SAVED_AFTER, KILLED_AFTER = 2, 8, 10
RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
NOTES = FOLDER / f"{KIND}-{PHASE}-{RANK}.jsonl"


class Model(lightning.LightningModule):
    """Notes what it is given, and is killed in time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        if PHASE == "killed" and self.global_step == KILLED_AFTER:
            os.kill(os.getpid(), signal.SIGKILL)
        with NOTES.open("a") as notes:
            notes.write(json.dumps(batch["input_ids"].tolist()) + "\n")
        loss: torch.Tensor = self.layer(batch["input_ids"].float().mean().reshape(1, 1)).sum()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


checkpoints = FOLDER / KIND
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=WORLD_SIZE,
    strategy="ddp" if WORLD_SIZE > 1 else "auto",
    max_epochs=EPOCHS,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[ModelCheckpoint(checkpoints, "saved", every_n_train_steps=SAVED_AFTER)],
    default_root_dir=FOLDER,
)
loader = fine_tuning_loader(KIND, WORLD_SIZE)
trainer.fit(Model(), loader, ckpt_path=checkpoints / "saved.ckpt" if PHASE == "resumed" else None)

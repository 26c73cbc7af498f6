"""Lightning on packed text: the data module takes plans, and a checkpoint from the middle of an epoch is exact.

    python examples/lightning_fit.py run/ --steps 40

Kill it at any time: started again it goes on from the last checkpoint, at the very next batch.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning
import small_data
import torch
from gpt_pretraining import GPT, prepared
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

import penstock
from penstock.integrations.lightning import DataModule, LogLoader


class Pretraining(lightning.LightningModule):
    """The GPT of gpt_pretraining.py."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GPT(small_data.VOCABULARY)

    def training_step(self, batch: dict, index: int) -> torch.Tensor:
        """The loss of a packed batch."""
        loss = self.model.loss(batch)
        self.log("loss", loss, batch_size=len(batch["input_ids"]), prog_bar=True)
        return loss

    def validation_step(self, batch: dict, index: int) -> None:
        """The loss of a packed batch, weighted by its targets."""
        self.log("validation_loss", self.model.loss(batch), batch_size=batch["num_targets"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """As anywhere."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    """Train; started again, go on where the last checkpoint stands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()

    train, validation = (
        penstock.open(prepared(arguments.folder)).split({"train": 0.95, "validation": 0.05}, seed=7).values()
    )
    data = DataModule(
        train=train.shuffle(seed=7).pack(128).batch(8), validation=validation.pack(128).batch(8, tail="even")
    )
    saving = ModelCheckpoint(arguments.folder / "lightning", every_n_train_steps=10, save_last=True)
    trainer = lightning.Trainer(
        max_steps=arguments.steps,
        max_epochs=-1,
        accelerator="auto",
        callbacks=[saving, LogLoader()],
        logger=CSVLogger(arguments.folder),
        log_every_n_steps=5,
        enable_progress_bar=False,
    )
    last = arguments.folder / "lightning" / "last.ckpt"
    trainer.fit(Pretraining(), data, ckpt_path=last if last.exists() else None)
    print(f"{trainer.global_step} steps, loss {trainer.callback_metrics['loss']:.3f}")


if __name__ == "__main__":
    main()

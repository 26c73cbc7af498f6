"""Runs of Lightning, as its users write them, that note what they trained on."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from penstock.integrations.lightning import DataModule, LogLoader

__all__ = ["DataModule", "LogLoader", "Metrics", "Noting", "fit", "lightning"]

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Noting(lightning.LightningModule):
    """Notes what it is given, and stops after so many steps."""

    def __init__(self, stops_after: int | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[Any] = []
        self.validated = 0
        self.stops_after = stops_after

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.seen.append((batch["input_ids"] if isinstance(batch, dict) else batch).ravel().tolist())
        if len(self.seen) == self.stops_after:
            self.trainer.should_stop = True
        return self.weight.sum()

    def validation_step(self, batch: Any, index: int) -> None:
        self.validated += 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class Metrics(lightning.pytorch.loggers.logger.DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:  # type: ignore[override]
        self.logged.append((step, metrics))


def fit(folder: Path, model: Noting, data: Any, *, steps: int, **others: Any) -> None:
    saving = ModelCheckpoint(dirpath=folder, every_n_train_steps=1, save_last=True)
    lightning.Trainer(
        max_steps=steps, max_epochs=-1, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False,
        min_steps=1, default_root_dir=folder, **{"logger": False, "callbacks": [saving], **others},
    ).fit(model, data, ckpt_path=folder / "last.ckpt" if (folder / "last.ckpt").exists() else None)  # fmt: skip

"""Trainers of transformers, as their users write and set them up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from penstock.integrations.transformers import ModelLoader, TakesPlans, Trainer, model_arguments

__all__ = ["ModelLoader", "ScaledTrainerOfPlans", "Stop", "Trainer", "arguments", "model_arguments"]


class Stop(transformers.TrainerCallback):
    def __init__(self, after: int) -> None:
        self.after = after

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == self.after


def arguments(folder: Path, kind: Any = transformers.TrainingArguments, **others: Any) -> Any:
    settings = {"per_device_train_batch_size": 4, "save_strategy": "no", "report_to": [], "use_cpu": True}
    return kind(output_dir=str(folder), disable_tqdm=True, **{**settings, **others})


class ScaledTrainer(transformers.Trainer):
    """A trainer as people write them: arguments of its own, and all others passed on."""

    def __init__(self, *args: Any, scale: float = 1.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scale = scale


class ScaledTrainerOfPlans(TakesPlans, ScaledTrainer):
    pass

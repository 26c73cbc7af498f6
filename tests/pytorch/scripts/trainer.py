"""Train with the Trainer of transformers: once in one go, and once stopped in mid-epoch and resumed.

    trainer.py TESTS FOLDER KIND...

Writes the samples of both runs' batches, one list per batch, to FOLDER/<kind>-<rank>.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, sys.argv[1])
os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1")

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

import penstock
from penstock.pytorch import Stream
from pytorch.examples import numbers
from pytorch.torch_examples import Numbers

FOLDER = Path(sys.argv[2])
EPOCHS, STEPS_PER_EPOCH, STOPS_AFTER = 3, 6, 8


def make_loader(kind: str, epoch: int) -> Any:
    """About six batches per epoch; those of a plan that carries go on over the end of an epoch.

    The Trainer tells no iterable dataset in which epoch it resumes, so a stream is told here.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if kind == "carry":
        return penstock.DataLoader(numbers(26).shuffle(seed=1).batch(4), num_workers=1)
    if kind == "parts":
        return penstock.DataLoader(numbers(24).shuffle(seed=1).batch(8, tail="drop"), micro_batch=8 // world_size // 2)
    if kind == "dataset":
        return penstock.DataLoader(numbers(24), batch_size=4 // world_size, shuffle=True, num_workers=0)
    if kind == "stream":
        records = SizedStream(FOLDER / "numbers.jsonl", 24 // world_size)
        records.set_epoch(epoch)
        return penstock.DataLoader(records, batch_size=4)
    assert kind == "torch"
    return penstock.DataLoader(Numbers(24), batch_size=4, collate_fn=lambda samples: {"x": torch.stack(samples)})


class SizedStream(Stream):
    """A stream of a known length: without one the Trainer asks for max_steps."""

    def __init__(self, path: Path, length: int) -> None:
        vars(self).update(vars(penstock.stream(path, shuffle_buffer=5)))
        self.length = length

    def __len__(self) -> int:
        return self.length


class Model(torch.nn.Module):
    """Notes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[list[int]] = []

    def forward(self, x: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        self.seen.append(x.tolist())
        return {"loss": (self.weight * x.float().mean()).sum()}


class Training(Trainer):
    def get_train_dataloader(self) -> Any:
        folder = Path(self.args.output_dir)
        has_stopped = (folder / f"checkpoint-{STOPS_AFTER}").exists() and folder.name == "stopped"
        return make_loader(folder.parent.name, STOPS_AFTER // STEPS_PER_EPOCH if has_stopped else 0)


class Stop(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == STOPS_AFTER


def train(folder: Path, callbacks: list[Any], *, resume: bool = False) -> list[list[int]]:
    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=EPOCHS,
        save_strategy="steps",
        save_steps=STOPS_AFTER,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    model = Model()
    Training(model=model, args=arguments, callbacks=callbacks).train(resume_from_checkpoint=resume)
    return model.seen


for kind in sys.argv[3:]:
    straight = train(FOLDER / kind / "straight", [])
    stopped = train(FOLDER / kind / "stopped", [Stop()]) + train(FOLDER / kind / "stopped", [], resume=True)
    (FOLDER / f"{kind}-{os.environ.get('RANK', '0')}.json").write_text(json.dumps([straight, stopped]))

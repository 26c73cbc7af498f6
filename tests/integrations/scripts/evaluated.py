"""Evaluate a plan with the Trainer, in one process or several, and write the loss: `evaluated.py FOLDER`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import transformers

sys.path.insert(0, str(Path(__file__).parents[2]))

from integrations.frameworks import documents, packed, tiny_llama
from penstock.integrations.transformers import Trainer

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    settings = {"per_device_train_batch_size": 2, "report_to": [], "use_cpu": True, "disable_tqdm": True}
    trainer = Trainer(
        tiny_llama(), transformers.TrainingArguments(output_dir=str(folder), **settings), train_dataset=packed()
    )
    rows = documents().pack(32).take(rows=21)  # the last batch has one row, which two ranks cannot share
    loss = trainer.evaluate(rows.batch(4, tail="even"))["eval_loss"]
    (folder / f"loss-{os.environ.get('RANK', 0)}").write_text(repr(loss))

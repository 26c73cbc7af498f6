"""The Trainer of transformers on packed batches: one import changes, and the dataset is a plan.

    python examples/hf_trainer.py run/ --steps 40
    torchrun --nproc_per_node 2 examples/hf_trainer.py run/ --steps 40

Kill it at any time: started again it goes on from the last checkpoint, at the very next batch.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import small_data
import transformers
from gpt_pretraining import prepared
from transformers.trainer_utils import get_last_checkpoint

import penstock
from penstock.integrations.transformers import Trainer


def main() -> None:
    """Train and evaluate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()

    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(
            vocab_size=small_data.VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4,
        )
    )  # fmt: skip
    settings = transformers.TrainingArguments(
        output_dir=str(arguments.folder / "trainer"),
        max_steps=arguments.steps,
        per_device_train_batch_size=4 // world_size,
        gradient_accumulation_steps=2,  # 2 x 4 rows: the plan's batch of 8
        learning_rate=3e-3,
        logging_steps=10,
        save_steps=10,
        report_to=[],  # "tensorboard", "wandb", "mlflow": what the loader measures goes there too
        use_cpu=True,
    )
    Path(settings.output_dir).mkdir(parents=True, exist_ok=True)
    with settings.main_process_first(desc="preparation"):  # the other processes find the data prepared
        data = penstock.open(prepared(arguments.folder))
    train, validation = data.split({"train": 0.95, "validation": 0.05}, seed=7).values()
    trainer = Trainer(
        model=model,
        args=settings,
        train_dataset=train.shuffle(seed=7).pack(128).batch(8),
        eval_dataset=validation.pack(128).batch(8, tail="even"),
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(settings.output_dir) is not None)
    print(trainer.evaluate())


if __name__ == "__main__":
    main()

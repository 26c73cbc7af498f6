"""TRL's SFTTrainer on packed conversations: one import changes, and the dataset is a plan.

    python examples/trl_sft.py run/ --steps 20

The conversations were rendered and masked once, by `prepare`; TRL neither tokenizes nor packs again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import small_data
import transformers
from sft_chat import prepared
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig

import penstock
from penstock.integrations.trl import SFTTrainer


def main() -> None:
    """Train and evaluate; started again, go on where the last checkpoint stands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()

    train, validation = (
        penstock.open(prepared(arguments.folder)).split({"train": 0.9, "validation": 0.1}, seed=7).values()
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(arguments.folder / "tokenizer.json"), eos_token=small_data.EOS, pad_token=small_data.EOS
    )
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(
            vocab_size=small_data.VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4,
        )
    )  # fmt: skip
    settings = SFTConfig(
        output_dir=str(arguments.folder / "sft"),
        max_steps=arguments.steps,
        per_device_train_batch_size=4,
        learning_rate=3e-3,
        logging_steps=5,
        save_steps=5,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    trainer = SFTTrainer(
        model,
        settings,
        train_dataset=train.shuffle(seed=7).pack(128).batch(4),
        eval_dataset=validation.pack(128).batch(4, tail="even"),
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(settings.output_dir) is not None)
    print(trainer.evaluate())


if __name__ == "__main__":
    main()

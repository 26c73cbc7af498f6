"""Fine-tune with TRL's SFTTrainer on packed rows or on a dataset: killed in mid-epoch, or resumed after that.

    sft.py TESTS FOLDER KIND PHASE      KIND: packed, dataset      PHASE: killed, resumed

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
os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1")

import datasets
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

from penstock import masks
from pytorch.examples import fine_tuning_loader

FOLDER, KIND, PHASE = Path(sys.argv[2]), *sys.argv[3:]
EPOCHS, SAVED_AFTER, KILLED_AFTER = 2, 8, 10
RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
NOTES = FOLDER / f"{KIND}-{PHASE}-{RANK}.jsonl"


class Training(SFTTrainer):  # type: ignore[misc]
    """TRL takes no other datasets than those of `datasets`, so the loader is given in its stead."""

    def get_train_dataloader(self) -> Any:
        return fine_tuning_loader(KIND, WORLD_SIZE)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        with NOTES.open("a") as notes:
            notes.write(json.dumps(inputs["input_ids"].tolist()) + "\n")
        inputs = masks.hugging_face_kwargs(inputs) if KIND == "packed" else inputs
        return super().compute_loss(model, inputs, *args, **kwargs)


class Kill(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == KILLED_AFTER:
            os.kill(os.getpid(), signal.SIGKILL)


words = Tokenizer(models.WordLevel({"<unk>": 0, "<pad>": 1, "<eos>": 2}, unk_token="<unk>"))
settings = SFTConfig(
    output_dir=str(FOLDER / KIND),
    num_train_epochs=EPOCHS,
    save_strategy="steps",
    save_steps=SAVED_AFTER,
    report_to=[],
    use_cpu=True,
    bf16=False,
    disable_tqdm=True,
    gradient_checkpointing=False,
    dataset_kwargs={"skip_prepare_dataset": True},
)
torch.set_num_threads(1)
size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
trainer = Training(
    model=LlamaForCausalLM(LlamaConfig(vocab_size=1024, **size)),
    args=settings,
    train_dataset=datasets.Dataset.from_list([{"input_ids": [0], "labels": [0]}]),  # not read
    processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"),
    callbacks=[Kill()] if PHASE == "killed" else [],
)
trainer.train(resume_from_checkpoint=PHASE == "resumed")
trainer.accelerator.end_training()  # else gloo's threads may abort the process as it ends

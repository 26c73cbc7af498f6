"""A fine-tuning script with Hugging Face's Trainer: evaluation, checkpoints, a data collator."""

import time

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments


class Texts(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        time.sleep(0.001)
        return {"input_ids": torch.arange(index % 7 + 2), "labels": torch.tensor(index % 2)}


def data_collator(features):
    longest = max(len(feature["input_ids"]) for feature in features)
    padded = [nn.functional.pad(each["input_ids"], (0, longest - len(each["input_ids"]))) for each in features]
    return {"input_ids": torch.stack(padded), "labels": torch.stack([each["labels"] for each in features])}


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.EmbeddingBag(16, 8), nn.Linear(8, 2)

    def forward(self, input_ids, labels=None):
        logits = self.head(self.embedding(input_ids))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


if __name__ == "__main__":
    args = TrainingArguments(
        output_dir="out",
        num_train_epochs=100,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        eval_strategy="steps",
        eval_steps=150,
        save_steps=300,
        logging_steps=100,
        report_to=[],
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    Trainer(
        model=Classifier(),
        args=args,
        train_dataset=Texts(8000),
        eval_dataset=Texts(32),
        data_collator=data_collator,
    ).train()

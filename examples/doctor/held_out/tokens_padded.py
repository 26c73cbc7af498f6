"""Ill: conversations are padded to the model's context, with an id that is not 0 and a mask beside it."""

import json
import os
import random

import torch
from torch.utils.data import DataLoader

FIX = json.loads(os.environ.get("FIX", "{}"))
CONTEXT, PAD, BATCH = 384, 999, 6
torch.set_num_threads(1)


def conversations():
    lengths = random.Random(3)
    for _ in range(12_000):
        length = min(CONTEXT, int(lengths.expovariate(1 / 90)) + 12)
        yield {"input_ids": [lengths.randrange(999) for _ in range(length)]}


def collate(rows):
    longest = max(len(row["input_ids"]) for row in rows) if FIX else CONTEXT
    ids = torch.full((len(rows), longest), PAD)
    for place, row in enumerate(rows):
        ids[place, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
    mask = (ids != PAD).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(1000, 128)
        self.block = torch.nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
        self.head = torch.nn.Linear(128, 1000)

    def forward(self, input_ids, attention_mask, labels):
        hidden = self.block(self.embedding(input_ids), src_key_padding_mask=attention_mask == 0)
        return torch.nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def batches_of_similar_length(rows, window=32 * BATCH):
    for begin in range(0, len(rows), window):
        places = sorted(range(begin, begin + window), key=lambda place: len(rows[place]["input_ids"]))
        groups = [places[first : first + BATCH] for first in range(0, window, BATCH)]
        yield from random.sample(groups, len(groups))


if __name__ == "__main__":
    rows, model = list(conversations())[: 12_000 // (32 * BATCH) * 32 * BATCH], Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    how = {"batch_sampler": list(batches_of_similar_length(rows))} if FIX else {"batch_size": BATCH, "shuffle": True}
    for _epoch in range(20):
        for batch in DataLoader(rows, collate_fn=collate, num_workers=1, **how):
            model(**batch).backward()
            optimizer.step()
            optimizer.zero_grad()

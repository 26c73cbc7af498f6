"""Ill: documents of very different lengths, all padded to the longest there could be."""

import json
import os

import torch
from torch.utils.data import DataLoader, Dataset

FIX = json.loads(os.environ.get("FIX", "{}"))
LONGEST, BATCH = 512, 8
torch.set_num_threads(1)
LENGTHS = torch.distributions.LogNormal(4.3, 0.6).sample((100_000,)).clamp(8, LONGEST).long()


class Documents(Dataset):
    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        return torch.full((int(LENGTHS[index]),), index % 1000 + 1)


def pad(documents):
    longest = max(map(len, documents)) if FIX else LONGEST
    rows = torch.zeros(len(documents), longest, dtype=torch.long)
    for row, document in zip(rows, documents, strict=True):
        row[: len(document)] = document
    return rows


def batches_of_similar_length(window=32 * BATCH):
    for begin in range(0, len(LENGTHS), window):
        places = (LENGTHS[begin : begin + window].argsort() + begin).view(-1, BATCH)
        yield from places[torch.randperm(len(places))].tolist()


how = {"batch_sampler": list(batches_of_similar_length())} if FIX else {"batch_size": BATCH, "shuffle": True}
embedding, layer = torch.nn.Embedding(1001, 256), torch.nn.Linear(256, 1024)
for tokens in DataLoader(Documents(), collate_fn=pad, num_workers=1, **how):
    layer(embedding(tokens)).square().mean().backward()

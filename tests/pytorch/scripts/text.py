"""A small GPT on characters, as nanoGPT trains one: token rows from a memory map. No guard, and a lambda."""

import os
import sys

import numpy as np
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

folder = sys.argv[1]
torch.manual_seed(1337)
torch.set_num_threads(1)
block, width, vocabulary = 32, 32, 64
path = os.path.join(folder, "train.bin")
np.random.default_rng(0).integers(0, vocabulary, 20_000).astype(np.uint16).tofile(path)


class Tokens(Dataset):
    def __init__(self):
        self.tokens = np.memmap(path, dtype=np.uint16, mode="r")

    def __len__(self):
        return 400

    def __getitem__(self, index):
        start = int(torch.randint(len(self.tokens) - block - 1, ())) if index % 2 else index * block
        row = torch.from_numpy(self.tokens[start : start + block + 1].astype(np.int64))
        return row[:-1], row[1:]


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = (
            torch.nn.LayerNorm(width),
            torch.nn.Linear(width, 3 * width),
            torch.nn.Linear(width, width),
        )
        self.mlp = torch.nn.Sequential(
            torch.nn.LayerNorm(width), torch.nn.Linear(width, 64), torch.nn.GELU(), torch.nn.Linear(64, width)
        )

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + functional.dropout(self.mlp(x), 0.1, self.training)


class GPT(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = torch.nn.Embedding(vocabulary, width), torch.nn.Embedding(block, width)
        self.blocks, self.head = torch.nn.Sequential(Block(), Block()), torch.nn.Linear(width, vocabulary)

    def forward(self, ids):
        return self.head(self.blocks(self.embed(ids) + self.place(torch.arange(block))))


loader = DataLoader(
    Tokens(),
    batch_size=16,
    shuffle=True,
    num_workers=2,
    drop_last=True,
    pin_memory=False,
    collate_fn=lambda rows: tuple(torch.stack(column) for column in zip(*rows, strict=True)),
)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for epoch in range(2):
    for step, (ids, targets) in enumerate(loader):
        loss = functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(f"epoch {epoch} step {step} loss {loss.item()!r}")

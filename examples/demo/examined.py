"""A small, typical training script, for the doctor to examine in the demo.

    python examined.py texts FOLDER       files are read and tokenized every time
    python examined.py prepared FOLDER    the dataset that the demo prepared from them

Steps are short, so that the doctor sees enough of them in a few seconds. It trains until the doctor stops it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers
import torch
from corpus import VOCABULARY, source_files
from torch import nn

import penstock

ROW, BATCH, MOST_CHARACTERS = 64, 4, 30_000


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The usual way without preparation."""

    def __init__(self, tokenizer: Path) -> None:
        self.tokenizer, self.files = tokenizers.Tokenizer.from_file(str(tokenizer)), source_files()

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        text = self.files[index].read_text(errors="replace")[:MOST_CHARACTERS]
        ids = torch.tensor(self.tokenizer.encode(text).ids[: ROW + 1])
        row = nn.functional.pad(ids, (0, ROW + 1 - len(ids)))
        return {"input_ids": row[:-1], "labels": row[1:]}


def make_loader(data: str, folder: Path) -> Iterable[dict[str, Any]]:
    """Batches, practically for ever."""
    if data == "prepared":
        plan = penstock.open(folder / "data").shuffle(seed=7).pack(ROW).batch(BATCH)
        return penstock.DataLoader(plan, epochs=None)
    texts = Texts(folder / "tokenizer.json")
    endless = torch.utils.data.RandomSampler(texts, num_samples=1_000_000)
    return torch.utils.data.DataLoader(texts, batch_size=BATCH, sampler=endless)


def main(data: str, folder: Path) -> None:
    """Train a model to predict the next token."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - 1))
    model = nn.Sequential(nn.Embedding(VOCABULARY, 64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, VOCABULARY))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in make_loader(data, folder):
        loss = nn.functional.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

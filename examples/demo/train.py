"""The training half of the demo: a tiny GPT on packed batches, in a separate process that can be killed.

Prints one line of JSON per step.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from corpus import BATCH, ROW, SEED, VOCABULARY, digest_of, make_plan
from torch import nn

import penstock
from penstock import masks

WIDTH, LAYERS, HEADS = 128, 2, 4


class TransformerBlock(nn.Module):
    """Attention over the tokens that each token may see, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.net = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        """One layer; `visible` is True where a token may look."""
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None])
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        deeper: torch.Tensor = self.net(self.norms[1](x))
        return x + deeper


class TinyGPT(nn.Module):
    """About a million parameters."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, WIDTH), nn.Embedding(ROW, WIDTH)
        self.blocks = nn.ModuleList([TransformerBlock() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary)

    def loss(self, batch: dict[str, Any], visible: torch.Tensor) -> torch.Tensor:
        """Mean loss over the targets of a batch."""
        x = self.tokens(batch["input_ids"]) + self.positions(batch["position_ids"])
        for block in self.blocks:
            x = block(x, visible)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), batch["labels"].flatten())


class PaddedDocuments(torch.utils.data.Dataset[torch.Tensor]):
    """The usual way without packing: one document per row, cut to the row's length."""

    def __init__(self, path: Path) -> None:
        self._dataset = penstock.open(path)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self._dataset[index]["tokens"][: ROW + 1].astype(np.int64))


def pad_together(documents: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """One document per row, padded to a full row."""
    rows = torch.zeros(len(documents), ROW + 1, dtype=torch.int64)
    labels = torch.full((len(documents), ROW), -100)
    for row, document in enumerate(documents):
        rows[row, : len(document)] = document
        labels[row, : len(document) - 1] = document[1:]
    positions = torch.arange(ROW).expand(len(documents), ROW)
    return {"input_ids": rows[:, :-1], "labels": labels, "position_ids": positions}


def torch_batches(path: Path) -> Iterator[tuple[dict[str, Any], torch.Tensor, dict[str, Any]]]:
    """(batch, mask, state) from torch's DataLoader with padding."""
    causal = torch.ones(ROW, ROW, dtype=torch.bool).tril().expand(BATCH, ROW, ROW)
    generator = torch.Generator().manual_seed(SEED)
    while True:
        loader = torch.utils.data.DataLoader(
            PaddedDocuments(path), BATCH, shuffle=True, drop_last=True, num_workers=1,
            collate_fn=pad_together, generator=generator,
        )  # fmt: skip
        for batch in loader:
            yield batch, causal, {}


def penstock_batches(path: Path, state: dict[str, Any] | None) -> Iterator[tuple[dict[str, Any], torch.Tensor, Any]]:
    """(batch, mask, state) from Penstock."""
    loader = penstock.DataLoader(make_plan(path), epochs=None)
    if state is not None:
        loader.load_state_dict(state)
    for batch in loader:
        yield batch, masks.dense(batch), loader.state_dict()


def train(arguments: argparse.Namespace) -> None:
    """Train, print one line of JSON per step, and save a checkpoint now and then."""
    torch.manual_seed(0)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - 1))
    model = TinyGPT(VOCABULARY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first, state = 0, None
    if arguments.checkpoint is not None and arguments.checkpoint.exists():
        saved = torch.load(arguments.checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first, state = saved["step"], saved["data"]
    padded = arguments.loader == "torch"
    batches = torch_batches(arguments.data) if padded else penstock_batches(arguments.data, state)
    for step in range(first, arguments.steps):
        begin = time.perf_counter()
        batch, visible, state = next(batches)
        waited = time.perf_counter() - begin
        loss = model.loss(batch, visible)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        targets = int((batch["labels"] != -100).sum())
        line: dict[str, Any] = {"step": step + 1, "loss": loss.item(), "targets": targets, "wait": waited}
        line |= {"seconds": time.perf_counter() - begin, "batch": digest_of(batch)}
        if arguments.checkpoint is not None and (step + 1) % arguments.save_every == 0:
            save(arguments.checkpoint, model, optimizer, step + 1, state)
            line["saved"] = state
        print(json.dumps(line), flush=True)


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, state: Any) -> None:
    """Write a checkpoint, all or nothing; the loader's state is a few numbers in it."""
    working = path.with_suffix(".tmp")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "data": state}, working)
    working.replace(path)


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--loader", choices=("penstock", "torch"), default="penstock")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--save-every", type=int, default=25)
    train(parser.parse_args())


if __name__ == "__main__":
    main()

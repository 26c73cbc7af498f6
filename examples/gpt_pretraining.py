"""Pretrain a small GPT on packed text with FlexAttention. Stop it with Ctrl-C or kill -9; started again, it continues.

python examples/gpt_pretraining.py run/ --steps 60       # for several processes, see ddp_resume.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import small_data
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

import penstock

ROW, BATCH, WIDTH, HEADS = 128, 8, 64, 4
compiled_attention = torch.compile(flex_attention)  # a new mask of the same shape does not compile it again


class Layer(nn.Module):
    """Attention inside documents, then a small network."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norms = nn.ModuleList([nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)])
        self.net = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, attend: Callable[..., torch.Tensor]) -> torch.Tensor:
        """One layer over [B, T, WIDTH]."""
        rows, length, _ = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = attend(q, k, v)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.net(self.norms[1](x))


class GPT(nn.Module):
    """Two layers."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, WIDTH), nn.Embedding(ROW, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)

    def loss(self, batch: dict) -> torch.Tensor:
        """Mean over the targets of the batch; -100 marks places without one."""
        attend = attention_of(batch)  # one mask for all layers
        x = self.tokens(batch["input_ids"]) + self.positions(batch["position_ids"])
        for layer in self.layers:
            x = layer(x, attend)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), batch["labels"].flatten())


def attention_of(batch: dict) -> Callable[..., torch.Tensor]:
    """Attention that keeps the batch's documents apart, by the boundaries that the plan knows."""
    if batch["input_ids"].is_cuda:
        return partial(compiled_attention, block_mask=penstock.masks.block_mask(batch))
    # FlexAttention has no backward pass on CPUs, so there the same mask is a dense one.
    visible = penstock.masks.dense(batch)[:, None]
    return partial(nn.functional.scaled_dot_product_attention, attn_mask=visible)


def prepared(folder: Path) -> Path:
    """The corpus as token shards: made once, whatever happens meanwhile."""
    if not (folder / "corpus").exists():
        text = small_data.text(folder)
        tokenizer = small_data.tokenizer(folder, text)
        penstock.prepare(text, folder / "corpus", transform=penstock.Tokenize(tokenizer, append_eos=small_data.EOS))
    return folder / "corpus"


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    plan = penstock.open(prepared(arguments.folder)).shuffle(seed=7).pack(ROW).batch(BATCH)
    loader = penstock.DataLoader(plan, epochs=None, device=device if device == "cuda" else None)
    torch.manual_seed(0)
    model = GPT(small_data.VOCABULARY).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    step, checkpoint = 0, arguments.folder / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["data"])  # a few numbers; nothing is replayed
        step = saved["step"]
        print(f"going on at step {step}")

    for batch in loader:
        loss = model.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 10 == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state | {"data": loader.state_dict()}, checkpoint.with_suffix(".tmp"))
            checkpoint.with_suffix(".tmp").replace(checkpoint)
            print(f"step {step}: loss {loss.item():.3f}, {loader.stats().ready_share:.0%} of batches were ready")
        if step >= arguments.steps:
            break
    loader.close()


if __name__ == "__main__":
    main()

"""A training loop as in nanoGPT: batches are cut from a memory map by hand, and no loader is there."""

import math
import os
import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

out_dir = "out"
eval_interval, eval_iters, log_interval = 200, 4, 50
gradient_accumulation_steps, batch_size, block_size = 2, 4, 32
learning_rate, max_iters, grad_clip = 6e-4, 600000, 1.0
os.makedirs(out_dir, exist_ok=True)
np.random.default_rng(1337).integers(0, 64, 100_000, np.uint16).tofile("train.bin")
torch.manual_seed(1337)


def get_batch(split):
    data = np.memmap("train.bin", dtype=np.uint16, mode="r")
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy((data[i : i + block_size]).astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy((data[i + 1 : i + 1 + block_size]).astype(np.int64)) for i in ix])
    return x, y


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)

    def forward(self, idx, targets):
        logits = self.head(self.wte(idx))
        return logits, F.cross_entropy(logits.view(-1, 64), targets.view(-1))


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = torch.tensor([model(*get_batch("val"))[1].item() for _ in range(eval_iters)])
    model.train()
    return losses.mean()


iter_num, best_val_loss, t0 = 0, math.inf, time.time()
X, Y = get_batch("train")
while True:
    if iter_num % eval_interval == 0:
        loss = estimate_loss()
        if loss < best_val_loss:
            best_val_loss = loss
            torch.save({"model": model.state_dict(), "iter_num": iter_num}, os.path.join(out_dir, "ckpt.pt"))
    for _micro_step in range(gradient_accumulation_steps):
        logits, loss = model(X, Y)
        X, Y = get_batch("train")
        (loss / gradient_accumulation_steps).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
    if iter_num > max_iters:
        break

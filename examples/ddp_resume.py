"""Train on several processes, stop, and go on with another number of them: the same global batches in the same order.

    torchrun --nproc_per_node 2 examples/ddp_resume.py run/ --steps 10
    torchrun --nproc_per_node 1 examples/ddp_resume.py run/ --steps 20     # or 4, or 8

Rank 0 writes the checkpoint; the loader's state is the same on every rank, and any number of ranks may load it.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import numpy as np
import torch
import torch.distributed as distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import penstock


def main() -> None:
    """Train; started again, go on where the checkpoint stands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()

    x = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    data = penstock.from_arrays({"x": x, "y": x.sum(1, keepdims=True), "index": np.arange(50)})
    plan = data.shuffle(seed=7).batch(8)  # rows of all ranks together
    loader = penstock.DataLoader(plan, epochs=None)  # finds its rank and the number of ranks

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step, checkpoint = 0, arguments.folder / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["data"])
        step = saved["step"]

    for batch in loader:
        loss = nn.functional.mse_loss(model(batch["x"]), batch["y"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rows = [None] * distributed.get_world_size()
        distributed.all_gather_object(rows, batch["index"].tolist())
        if rank == 0:
            print(
                f"step {step} on {len(rows)} ranks: rows {sorted(itertools.chain(*rows))}, loss {loss.item():.3f}",
                flush=True,
            )
        step += 1
        if rank == 0 and step % 5 == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state | {"data": loader.state_dict()}, checkpoint)
        if step >= arguments.steps:
            break
    loader.close()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()

"""torch.distributed.checkpoint: the loader of a plan is `Stateful` as it is, and any number of ranks may load it.

    torchrun --nproc_per_node 2 examples/distributed_checkpoint.py run/ --steps 10
    torchrun --nproc_per_node 1 examples/distributed_checkpoint.py run/ --steps 20

The loader of a torch dataset has a state of its own on each rank; there write `{"data": RankState(loader)}`, from
`penstock.integrations.checkpoint`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import small_data
import torch
import torch.distributed as distributed
import torch.distributed.checkpoint as dcp
from gpt_pretraining import GPT, prepared
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import penstock


class Model:
    """Model and optimizer in the layout that a distributed checkpoint wants: no rank's names, no rank's parts."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict:
        """For `dcp.save`."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict) -> None:
        """For `dcp.load`."""
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def main() -> None:
    """Train; started again, go on where the last checkpoint stands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    if rank == 0:
        prepared(arguments.folder)
    distributed.barrier()

    plan = penstock.open(prepared(arguments.folder)).shuffle(seed=7).pack(128).batch(8)
    loader = penstock.DataLoader(plan, epochs=None)
    torch.manual_seed(0)
    gpt = GPT(small_data.VOCABULARY)
    gpt.forward = gpt.loss
    model = torch.nn.parallel.DistributedDataParallel(gpt)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    states, step = arguments.folder / "dcp", 0
    saved = sorted((int(path.name) for path in states.glob("*")), reverse=True)
    if saved:
        step = saved[0]
        dcp.load({"app": Model(model, optimizer), "data": loader}, checkpoint_id=states / str(step))
    for batch in loader:
        loss = model(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 5 == 0:
            dcp.save({"app": Model(model, optimizer), "data": loader}, checkpoint_id=states / str(step))
            if rank == 0:
                print(f"step {step}: loss {loss.item():.3f}, state {loader.state_dict()['row']}", flush=True)
        if step >= arguments.steps:
            break
    loader.close()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()

"""A loop in torchtitan's style: a device mesh, gradients accumulated over micro-batches, a `Stateful` trainer.

    torchrun --nproc_per_node 2 examples/torchtitan_style.py run/ --steps 12

Data is split over the data-parallel ranks of the mesh, not over all processes: ranks that share a model (tensor,
pipeline or context parallel) are given the same `rank` here, and so the same rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import small_data
import torch
import torch.distributed as distributed
import torch.distributed.checkpoint as dcp
from gpt_pretraining import GPT, prepared
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

import penstock

STEP, MICRO_BATCH = 8, 2


class Trainer:
    """What a checkpoint holds is what `state_dict` names; the loader is one entry among them."""

    def __init__(self, folder: Path) -> None:
        mesh = init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("dp",))["dp"]
        self.folder, self.rank, self.step = folder, mesh.get_local_rank(), 0
        if distributed.get_rank() == 0:
            prepared(folder)
        distributed.barrier()
        plan = penstock.open(prepared(folder)).shuffle(seed=7).pack(128).batch(STEP)
        self.loader = penstock.DataLoader(
            plan, epochs=None, micro_batch=MICRO_BATCH, rank=mesh.get_local_rank(), world_size=mesh.size()
        )
        self.num_parts = STEP // mesh.size() // MICRO_BATCH
        torch.manual_seed(0)
        self.model = GPT(small_data.VOCABULARY)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)

    def state_dict(self) -> dict:
        """For `dcp.save`."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"step": self.step, "model": model, "optimizer": optimizer, "data": self.loader.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        """For `dcp.load`."""
        self.step = state["step"]
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.loader.load_state_dict(state["data"])

    def train_step(self, batches: Iterator[dict]) -> float:
        """One step: the sum of losses over all targets of all ranks, divided by their number, which the plan knows."""
        total = torch.zeros(())
        for _ in range(self.num_parts):
            batch = next(batches)
            num_targets = int((batch["labels"] != -100).sum())
            loss = self.model.loss(batch) * num_targets / batch["num_targets_global"]
            loss.backward()
            total += loss.detach()
        for parameter in self.model.parameters():
            distributed.all_reduce(parameter.grad)
        distributed.all_reduce(total)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return total.item()

    def train(self, steps: int) -> None:
        """Go on from the last checkpoint, if there is one."""
        states = self.folder / "titan"
        saved = [int(path.name) for path in states.glob("*")]
        if saved:
            dcp.load({"trainer": self}, checkpoint_id=states / str(max(saved)))
        batches = iter(self.loader)
        while self.step < steps:
            loss = self.train_step(batches)
            if self.step % 4 == 0:
                dcp.save({"trainer": self}, checkpoint_id=states / str(self.step))
                if self.rank == 0:
                    print(f"step {self.step}: loss {loss:.3f}", flush=True)
        self.loader.close()


def main() -> None:
    """Train; started again, go on where the last checkpoint stands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    distributed.init_process_group("gloo")
    Trainer(arguments.folder).train(arguments.steps)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()

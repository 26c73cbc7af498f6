"""Train on a plan with DDP by hand, and write what each rank was given: `shared.py FOLDER KIND FROM TO`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2]))

from integrations.frameworks import shared_plans, tiny_llama
from penstock.integrations.transformers import ModelLoader

if __name__ == "__main__":
    folder, kind, begin, end = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    plan = shared_plans()[kind]
    model = DistributedDataParallel(tiny_llama())
    loader = ModelLoader(plan, num_workers=0, epochs=None, rank=rank, world_size=world_size)
    if begin:
        loader.load_state_dict(json.loads((folder / "state.json").read_text()))
    rows, losses = [], []
    for _, batch in zip(range(begin, end), loader, strict=False):
        targets = (batch["labels"] != -100).sum()
        distributed.all_reduce(targets)
        loss = model(**batch).loss * (batch["labels"] != -100).sum()
        (loss * world_size / targets).backward()  # DDP waits here for ranks that have no batch
        distributed.all_reduce(loss := loss.detach())
        losses.append(float(loss / targets))
        rows.append(batch["input_ids"].tolist())
    if rank == 0:
        (folder / "state.json").write_text(json.dumps(loader.state_dict()))
    (folder / f"{kind}-{begin}-{rank}.json").write_text(json.dumps({"rows": rows, "losses": losses}))
    distributed.barrier()
    os._exit(0)  # a thread of gloo's aborts one interpreter in twenty that ends in the usual way

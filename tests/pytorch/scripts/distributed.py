"""Data-parallel training on two processes over gloo, each with its share by `DistributedSampler`."""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.manual_seed(7)
    torch.set_num_threads(1)
    inputs = torch.randn(99, 4)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    sampler = DistributedSampler(data, seed=3)
    loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=1)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with open(os.path.join(folder, f"losses-{rank}"), "w") as log:
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for x, y in loader:
                loss = torch.nn.functional.mse_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                log.write(f"rank {rank} epoch {epoch} loss {loss.item()!r}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(train, (sys.argv[1],), nprocs=2)
    for rank in range(2):
        with open(os.path.join(sys.argv[1], f"losses-{rank}")) as log:
            print(log.read(), end="")

"""A script for `torchrun`: one process per rank, a distributed sampler, rank 0 logs and saves."""

import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Rows(Dataset):
    def __len__(self):
        return 8000

    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.full((8,), index / 8000)


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = int(os.environ["LOCAL_RANK"])
    model = DDP(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    sampler = DistributedSampler(Rows())
    loader = DataLoader(Rows(), batch_size=8, sampler=sampler)
    try:
        for epoch in range(100):
            sampler.set_epoch(epoch)
            for step, batch in enumerate(loader):
                optimizer.zero_grad()
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
                if rank == 0 and step % 100 == 0:
                    print(f"epoch {epoch} step {step} loss {loss.item():.4f}", flush=True)
            if rank == 0:
                torch.save(model.module.state_dict(), "ddp.pt")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

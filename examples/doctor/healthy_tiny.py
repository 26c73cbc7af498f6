"""Healthy: a small model on a small table in memory, one short epoch after the other."""

import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(
    torch.nn.Linear(16, 256), torch.nn.Tanh(), torch.nn.Linear(256, 256), torch.nn.Linear(256, 1)
)
optimizer = torch.optim.Adam(model.parameters())
table = TensorDataset(torch.randn(640, 16), torch.randn(640, 1))
for _epoch in range(10_000):
    for inputs, targets in DataLoader(table, batch_size=16):
        for _ in range(4):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()

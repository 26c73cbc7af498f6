"""Healthy: the processor computes, and the data is cheap."""

import torch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(512, 16384), torch.nn.ReLU(), torch.nn.Linear(16384, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
data = TensorDataset(torch.randn(60_000, 512), torch.randint(10, (60_000,)))
for _epoch in range(100):
    for rows, labels in DataLoader(data, batch_size=128, shuffle=True, num_workers=1):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(rows), labels).backward()
        optimizer.step()

"""Ill: rows of a table in memory, made at once, travel from worker processes."""

import json
import os

import torch
from torch.utils.data import DataLoader, TensorDataset

OPTIONS = {"num_workers": 2} | json.loads(os.environ.get("FIX", "{}"))

if __name__ == "__main__":
    torch.set_num_threads(1)
    table = TensorDataset(torch.randn(1_000_000, 16), torch.randn(1_000_000, 1))
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for inputs, targets in DataLoader(table, batch_size=32, shuffle=True, **OPTIONS):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()

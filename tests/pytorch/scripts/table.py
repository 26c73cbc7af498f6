"""A perceptron on a CSV file that is read as it comes: an iterable dataset, shared out between workers."""

import csv
import os
import random
import sys

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Table(IterableDataset):
    def __init__(self, path):
        self.path = path

    def __iter__(self):
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        with open(self.path, newline="") as file:
            for number, row in enumerate(csv.DictReader(file)):
                if number % num_workers == worker:
                    noise = random.gauss(0, 0.01)
                    features = torch.tensor([float(row[name]) + noise for name in ("a", "b", "c")])
                    yield {"features": features, "target": float(row["y"]), "name": row["name"]}


def main():
    path = os.path.join(sys.argv[1], "table.csv")
    rng = random.Random(0)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["name", "a", "b", "c", "y"])
        for number in range(301):
            values = [rng.random() for _ in range(3)]
            writer.writerow([f"row, {number}", *values, sum(values) ** 2])
    torch.manual_seed(2)
    loader = DataLoader(Table(path), batch_size=16, num_workers=2)
    model = torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(3):
        for batch in loader:
            loss = torch.nn.functional.mse_loss(model(batch["features"]).squeeze(1), batch["target"].float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"epoch {epoch} {batch['name'][0]} loss {loss.item()!r}")


if __name__ == "__main__":
    main()

"""A script as in Accelerate's examples: everything goes through `prepare`, evaluation gathers from all processes."""

import time

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        time.sleep(0.001)
        return {"x": torch.full((8,), index / self.size), "labels": index % 2}


def training_function():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    train_dataloader = DataLoader(Rows(8000), shuffle=True, batch_size=8)
    eval_dataloader = DataLoader(Rows(32), batch_size=8)
    model = nn.Linear(8, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    for _epoch in range(100):
        model.train()
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(batch["x"]), batch["labels"])
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
        model.eval()
        for batch in eval_dataloader:
            with torch.no_grad():
                predictions = model(batch["x"]).argmax(dim=-1)
            accelerator.gather_for_metrics((predictions, batch["labels"]))


if __name__ == "__main__":
    training_function()

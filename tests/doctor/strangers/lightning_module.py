"""A Lightning module with training and validation loaders, a checkpoint callback and a progress bar."""

import time

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.full((8,), index / self.size), index % 2


class LitClassifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.layer(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.layer(x), y))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(Rows(8000), batch_size=8, shuffle=True)

    def val_dataloader(self):
        return DataLoader(Rows(32), batch_size=8)


if __name__ == "__main__":
    L.seed_everything(7)
    checkpoint = L.pytorch.callbacks.ModelCheckpoint(dirpath="checkpoints", monitor="val_loss")
    trainer = L.Trainer(
        max_epochs=1000, accelerator="cpu", logger=False, callbacks=[checkpoint], val_check_interval=200
    )
    trainer.fit(LitClassifier(), datamodule=Data())

"""A small ResNet on a folder of JPEGs, with augmentations from every generator people use."""

import os
import random
import sys

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset


def make_folder(folder):
    rng = np.random.default_rng(0)
    for label in ("cat", "dog", "eel"):
        os.makedirs(os.path.join(folder, label), exist_ok=True)
        for number in range(20):
            pixels = rng.integers(0, 255, (40, 48, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(os.path.join(folder, label, f"{number}.jpg"), quality=90)


class ImageFolder(Dataset):
    def __init__(self, folder, transform):
        self.classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
        self.samples = [
            (os.path.join(folder, name, file), label)
            for label, name in enumerate(self.classes)
            for file in sorted(os.listdir(os.path.join(folder, name)))
        ]
        self.transform = transform

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        path, label = self.samples[index]
        with Image.open(path) as image:
            return self.transform(image.convert("RGB")), label


def augment(image):
    left, top = random.randint(0, 16), random.randint(0, 8)
    image = image.crop((left, top, left + 32, top + 32))
    if torch.rand(1).item() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    pixels = np.asarray(image, dtype=np.float32) / 255
    pixels = pixels * np.random.uniform(0.8, 1.2) + np.random.normal(0, 0.01, pixels.shape).astype(np.float32)
    return torch.from_numpy(pixels).permute(2, 0, 1)


class Residual(nn.Module):
    def __init__(self, channels_in, channels, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, 1, 1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.short = nn.Sequential(nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x):
        return torch.relu(self.body(x) + self.short(x))


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    folder = os.path.join(sys.argv[1], "jpegs")
    make_folder(folder)
    data = ImageFolder(folder, augment)
    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(data, batch_size=8, shuffle=True, num_workers=2, persistent_workers=True, generator=generator)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        Residual(8, 8, 1),
        Residual(8, 16, 2),
        Residual(16, 16, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 3),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(2):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"epoch {epoch} loss {loss.item()!r}")


if __name__ == "__main__":
    main()

"""An image script in the way of torchvision's references/classification: arguments, a logger, mixup, evaluation."""

import argparse
import datetime
import io
import os
import time
from collections import defaultdict, deque

import numpy as np
import torch
import torch.utils.data
from PIL import Image
from torch import nn
from torch.utils.data.dataloader import default_collate


class SmoothedValue:
    def __init__(self, window_size=20):
        self.deque, self.total, self.count = deque(maxlen=window_size), 0.0, 0

    def update(self, value, n=1):
        self.deque.append(value)
        self.count += n
        self.total += value * n

    @property
    def global_avg(self):
        return self.total / max(1, self.count)


class MetricLogger:
    def __init__(self):
        self.meters = defaultdict(SmoothedValue)

    def log_every(self, iterable, print_freq, header):
        start = end = time.time()
        data_time = SmoothedValue()
        for i, obj in enumerate(iterable):
            data_time.update(time.time() - end)
            yield obj
            if i % print_freq == 0:
                eta = datetime.timedelta(seconds=int((time.time() - start) / (i + 1) * (len(iterable) - i)))
                print(f"{header} [{i}/{len(iterable)}] eta: {eta} data: {data_time.global_avg:.4f}")
            end = time.time()


class ImageFolder(torch.utils.data.Dataset):
    def __init__(self, size):
        file = io.BytesIO()
        pixels = np.random.default_rng(0).integers(0, 255, (96, 96, 3), np.uint8)
        Image.fromarray(pixels).save(file, "JPEG")
        self.samples = [(file.getvalue(), index % 10) for index in range(size)]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        data, target = self.samples[index]
        image = Image.open(io.BytesIO(data)).convert("RGB").resize((64, 64))
        return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float().div(255), target


def mixup(batch):
    images, target = default_collate(batch)
    weight = float(np.random.default_rng().beta(0.2, 0.2))
    return images * weight + images.roll(1, 0) * (1 - weight), target


def train_one_epoch(model, criterion, optimizer, data_loader, device, epoch, args):
    model.train()
    metric_logger = MetricLogger()
    for image, target in metric_logger.log_every(data_loader, args.print_freq, f"Epoch: [{epoch}]"):
        image, target = image.to(device, non_blocking=True), target.to(device)
        loss = criterion(model(image), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        metric_logger.meters["loss"].update(loss.item(), n=image.shape[0])


def evaluate(model, criterion, data_loader, device):
    model.eval()
    with torch.inference_mode():
        for image, target in MetricLogger().log_every(data_loader, 100, "Test:"):
            criterion(model(image.to(device)), target.to(device))


def main(args):
    device = torch.device(args.device)
    torch.set_num_threads(1)
    dataset, dataset_test = ImageFolder(2400), ImageFolder(64)
    data_loader = torch.utils.data.DataLoader(
        dataset,
        batch_size=args.batch_size,
        sampler=torch.utils.data.RandomSampler(dataset),
        num_workers=args.workers,
        pin_memory=False,
        collate_fn=mixup,
    )
    data_loader_test = torch.utils.data.DataLoader(dataset_test, batch_size=args.batch_size, num_workers=args.workers)
    model = nn.Sequential(nn.Conv2d(3, 4, 8, stride=8), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10)).to(device)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    for epoch in range(args.epochs):
        train_one_epoch(model, criterion, optimizer, data_loader, device, epoch, args)
        lr_scheduler.step()
        evaluate(model, criterion, data_loader_test, device)
        torch.save({"model": model.state_dict(), "epoch": epoch}, os.path.join(args.output_dir, "checkpoint.pth"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("-b", "--batch-size", default=16, type=int)
    parser.add_argument("-j", "--workers", default=0, type=int)
    parser.add_argument("--epochs", default=90, type=int)
    parser.add_argument("--lr", default=0.01, type=float)
    parser.add_argument("--print-freq", default=50, type=int)
    parser.add_argument("--output-dir", default=".")
    main(parser.parse_args())

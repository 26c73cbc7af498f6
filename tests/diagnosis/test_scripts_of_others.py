"""Scripts that nobody wrote with the doctor in mind: each runs, is seen, and stops without a trace in its output."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from .scripts import diagnose

pytest.importorskip("torch")

HEAD = """
import sys, time, torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

class Slow(Dataset):
    def __len__(self):
        return 4000
    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.full((4,), float(index))

def step(batch):
    assert batch.shape[-1] == 4
    time.sleep(0.004)
"""

LOOPS = {
    "a training loop that asks for the next batch itself": """
loader = DataLoader(Slow(), batch_size=8, shuffle=True)
batches = iter(loader)
while True:
    try:
        batch = next(batches)
    except StopIteration:
        batches = iter(loader)
        continue
    step(batch)
""",
    "catches Exception around its loop": """
while True:
    try:
        for batch in DataLoader(Slow(), batch_size=8):
            step(batch)
    except Exception as error:
        print("caught", repr(error))
""",
    "makes its loader in a function called from main": """
def make(workers):
    return DataLoader(Slow(), batch_size=8, num_workers=workers)

def main():
    for epoch in range(100):
        for batch in make(1):
            step(batch)

if __name__ == "__main__":
    main()
""",
    "shows a progress bar": """
from tqdm import tqdm
for epoch in range(100):
    for batch in tqdm(DataLoader(Slow(), batch_size=8)):
        step(batch)
""",
    "zips two loaders": """
for epoch in range(100):
    for a, b in zip(DataLoader(TensorDataset(torch.zeros(4000, 4)), batch_size=8), DataLoader(Slow(), batch_size=8)):
        step(b)
""",
    "validates in the middle of training": """
train, valid = DataLoader(Slow(), batch_size=8), DataLoader(TensorDataset(torch.zeros(64, 4)), batch_size=8)
for epoch in range(100):
    for number, batch in enumerate(train):
        step(batch)
        if number % 50 == 49:
            with torch.no_grad():
                for (rows,) in valid:
                    step(rows)
""",
    "reads an iterable dataset": """
class Stream(IterableDataset):
    def __iter__(self):
        for number in range(1_000_000):
            time.sleep(0.001)
            yield torch.full((4,), float(number))
for batch in DataLoader(Stream(), batch_size=8):
    step(batch)
""",
    "changes its batches in place and counts on their number": """
schedule = torch.optim.lr_scheduler.OneCycleLR(
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0), max_lr=1.0, total_steps=500 * 20 + 1)
for epoch in range(20):
    for batch in DataLoader(Slow(), batch_size=8):
        batch.div_(1000).clamp_(0, 4)
        step(batch)
        schedule.optimizer.step()
        schedule.step()
""",
}
STARTS = """
if __name__ == "__main__":
    for epoch in range(100):
        for batch in DataLoader(Slow(), batch_size=8, num_workers=1, multiprocessing_context={method!r}):
            step(batch)
"""


def check(found: dict[str, object], finding: bool = True) -> None:
    stderr = str(found["stderr"])
    assert "Traceback" not in stderr, stderr
    assert "caught" not in stderr
    assert found["ceiling"] is not None, found
    if finding:
        assert found["ceiling"]["ratio"] > 1.15, found  # type: ignore[index]
        assert found["exit_code"] == 1, found


QUICK = ("zips two loaders",)


@pytest.mark.parametrize(
    "kind", [name if name in QUICK else pytest.param(name, marks=pytest.mark.stress) for name in LOOPS]
)
def test_a_script_that(kind: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HEAD + LOOPS[kind])
    check(diagnose("train.py", options=("--seconds", "8"), cwd=tmp_path))


@pytest.mark.stress
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_however_they_start(method: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HEAD + STARTS.format(method=method))
    check(diagnose("train.py", options=("--seconds", "8"), cwd=tmp_path), finding=False)


RANKS = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
sampler = DistributedSampler(Slow())
for epoch in range(100):
    sampler.set_epoch(epoch)
    for batch in DataLoader(Slow(), batch_size=8, sampler=sampler):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
"""


def test_ranks_that_train_together_change_and_stop_together(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HEAD + RANKS)
    launcher = str(Path(sys.executable).with_name("torchrun"))
    found = diagnose(
        launcher, "--standalone", "--nproc-per-node=2", "train.py", options=("--seconds", "8"), cwd=tmp_path
    )
    assert "ChildFailedError" not in found["stderr"]
    check(found)


ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.SGD(model.parameters(), lr=1e-9), DataLoader(Slow(), batch_size=8))
for epoch in range(100):
    for batch in loader:
        accelerator.backward(model(batch).sum())
        optimizer.step()
        optimizer.zero_grad()
"""
TRAINER = """
import transformers
class Rows(Slow):
    def __getitem__(self, index):
        return {"x": super().__getitem__(index)}
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def forward(self, x):
        return {"loss": self.layer(x).sum()}
arguments = transformers.TrainingArguments(
    output_dir="out", max_steps=100_000, per_device_train_batch_size=8, report_to=[], use_cpu=True, save_strategy="no",
    learning_rate=1e-9, disable_tqdm=True, dataloader_pin_memory=False)
transformers.Trainer(model=Model(), args=arguments, train_dataset=Rows()).train()
"""


@pytest.mark.stress
@pytest.mark.parametrize("text", [ACCELERATE, TRAINER], ids=["Accelerate", "Hugging Face Trainer"])
def test_frameworks(text: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HEAD + text)
    check(diagnose("train.py", options=("--seconds", "8"), cwd=tmp_path))

"""The time of day may jump, as when a machine asks a time server: nobody waits by it, and nothing is given up."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LOADING = """
import itertools, json, sys, time
import numpy as np
import penstock

begin, seen = time.monotonic(), []

def batches(**options):
    with penstock.DataLoader(plan, **options) as loader:
        for batch in penstock.watch(loader, sample_seconds=0.05):
            seen.append(time.time())
            time.sleep(0.002)
            yield batch["x"].tolist()

plan = penstock.from_arrays({"x": np.arange(2000)}).shuffle(seed=1).batch(10)
expected = [plan.read(step)["x"].tolist() for step in range(200)]
with penstock.serve(plan, "127.0.0.1:0", num_workers=2) as server:
    for options in ({"remote": server.address}, {"workers": "process", "num_workers": 2}, {"workers": "thread"}):
        assert list(batches(**options)) == expected, options
with open("documents.jsonl", "w") as file:
    file.writelines(json.dumps({"text": f"document {number}"}) + "\\n" for number in range(500))
penstock.prepare("documents.jsonl", "data", transform=penstock.Tokenize("bytes"), workers=2)
assert len(penstock.open("data")) == 500
print(json.dumps([max(seen) - min(seen), time.monotonic() - begin]))
"""

TRAINING = """
import time, torch

class Slow(torch.utils.data.Dataset):
    def __len__(self): return 100_000
    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.zeros(4)

for batch in torch.utils.data.DataLoader(Slow(), batch_size=4):
    torch.ones(1, requires_grad=True)
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """In which the time of day jumps, in a process and in all that it starts."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("a clock that jumps needs Linux and a C compiler (cc or gcc), and there is none")
    library, source = tmp_path_factory.mktemp("clock") / "clock.so", Path(__file__).with_name("jumping_clock.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return os.environ | {"LD_PRELOAD": str(library)}


def test_servers_loaders_and_prepare_lose_nothing_and_do_not_wait(environment: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADING], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    jumped, took = json.loads(done.stdout)
    assert jumped > 30_000
    assert took < 60


@pytest.mark.stress
def test_the_doctor_ends_in_time_and_measures(environment: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(TRAINING)
    words = ["doctor", "--json", "--seconds", "6", "--", "train.py"]
    done = subprocess.run(
        [sys.executable, "-m", "penstock.cli", *words],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert found["findings"][0]["id"] == "no-workers", done.stderr
    assert 1 < found["findings"][0]["measured_gain"] < 50

"""Training from tars where they are: killed, and resumed at the exact next batch on other numbers of ranks."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import webdataset
from PIL import Image

import penstock

SCRIPT = """
import json, os, sys, time
sys.path.insert(0, sys.argv[2])
import penstock
from pytorch.test_tars import plan_of

loader = penstock.DataLoader(plan_of(sys.argv[1]))
for step, batch in enumerate(loader):
    with open("state.new", "w") as file:
        keys = [key.decode() for key in batch["__key__"]]
        json.dump({"step": step, "state": loader.state_dict(), "keys": keys}, file)
    os.replace("state.new", "state.json")
    print(step, flush=True)
    if step >= 4:
        time.sleep(60)
"""


@penstock.pure
def decode(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "jpg": np.asarray(Image.open(io.BytesIO(row["jpg"])))}


def plan_of(folder: str) -> penstock.Plan:
    tars = penstock.open(f"{folder}/train-{{00..02}}.tar", columns=["__key__", "jpg", "cls"])
    return tars.shuffle(seed=7).map(decode).batch(8)


def make_tars(folder: Path) -> None:
    for number in range(3):
        with webdataset.TarWriter(str(folder / f"train-{number:02}.tar")) as writer:
            for sample in range(40 * number, 40 * number + 40):
                pixels = np.full((16, 16, 3), sample, np.uint8)
                writer.write({"__key__": f"{sample:04}", "jpg": Image.fromarray(pixels), "cls": sample % 5})


def test_a_killed_run_goes_on_at_the_exact_next_batch_on_1_2_and_4_ranks(tmp_path: Path) -> None:
    make_tars(tmp_path)
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(Path(__file__).parent.parent)]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        while run.stdout.readline().strip() != "4":
            assert run.poll() is None
        run.send_signal(signal.SIGKILL)
    saved = json.loads((tmp_path / "state.json").read_text())
    plan = plan_of(str(tmp_path))
    assert saved["keys"] == [key.decode() for key in plan.read(saved["step"])["__key__"]]
    expected = [plan.read(step) for step in range(5, 15)]
    for num_ranks in (1, 2, 4):
        for rank in range(num_ranks):
            loader = penstock.DataLoader(plan, rank=rank, world_size=num_ranks, num_workers=1)
            loader.load_state_dict(saved["state"])
            for batch, whole in zip(loader, expected[: 10 if num_ranks == 1 else 3], strict=False):
                assert list(batch["__key__"]) == list(whole["__key__"])[rank::num_ranks]
                assert np.array_equal(batch["jpg"].numpy(), whole["jpg"][rank::num_ranks])
                assert batch["cls"].tolist() == whole["cls"][rank::num_ranks].tolist()
            loader.close()

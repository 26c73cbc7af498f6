"""Train on a CSV file as it is: nothing is prepared, and a checkpoint still says exactly which record comes next.

python examples/csv_stream.py run/ --steps 100
"""

from __future__ import annotations

import argparse
from pathlib import Path

import small_data
import torch
from torch import nn

import penstock


def features(record: dict[str, str]) -> dict[str, list[float]]:
    """A record's fields as numbers; in a CSV file they are text."""
    return {"x": [float(record["x1"]), float(record["x2"])], "y": [float(record["y"])]}


def collate(records: list[dict]) -> dict[str, torch.Tensor]:
    """Records side by side."""
    return {name: torch.tensor([record[name] for record in records]) for name in ("x", "y")}


def main() -> None:
    """Train; started again, go on where the checkpoint stands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()

    stream = penstock.stream(small_data.table(arguments.folder), shuffle_buffer=500, seed=7, transform=features)
    loader = penstock.DataLoader(stream, batch_size=32, collate_fn=collate)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    step, checkpoint = 0, arguments.folder / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["data"])
        step = saved["step"]
        print(f"going on at step {step}")
    while step < arguments.steps:
        for batch in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(batch["x"]), batch["y"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 20 == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state | {"data": loader.state_dict()}, checkpoint)  # the data's part is under 1 KB
                print(f"step {step}: loss {loss.item():.3f}")
            if step >= arguments.steps:
                break


if __name__ == "__main__":
    main()

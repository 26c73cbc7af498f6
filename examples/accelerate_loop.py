"""Accelerate needs no glue: `prepare` leaves a plan's loader alone, `save_state` and `load_state` keep its position.

python examples/accelerate_loop.py run/ --steps 40
accelerate launch --num_processes 2 examples/accelerate_loop.py run/ --steps 40
"""

from __future__ import annotations

import argparse
from pathlib import Path

import small_data
import torch
from accelerate import Accelerator
from gpt_pretraining import GPT, prepared

import penstock


def main() -> None:
    """Train; started again, go on where the last state was saved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    with accelerator.main_process_first():
        corpus = prepared(arguments.folder)
    plan = penstock.open(corpus).shuffle(seed=7).pack(128).batch(8)
    # Each process gets its share of every batch from the plan, and on its device from the loader.
    loader = penstock.DataLoader(plan, epochs=None, device=accelerator.device if torch.cuda.is_available() else None)
    torch.manual_seed(0)
    model = GPT(small_data.VOCABULARY)
    model.forward = model.loss  # so that calling the model, prepared for several processes, gives the loss
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3), loader)

    states, step = arguments.folder / "states", 0
    if states.exists():
        step = max(int(path.name) for path in states.iterdir())
        accelerator.load_state(str(states / str(step)))
        accelerator.print(f"going on at step {step}")
    for batch in loader:
        loss = model(batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 10 == 0:
            accelerator.save_state(str(states / str(step)))
            accelerator.print(f"step {step}: loss {loss.item():.3f}")
        if step >= arguments.steps:
            break


if __name__ == "__main__":
    main()

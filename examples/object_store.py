"""Prepare text straight into an object store and train on it from there, in mid-epoch again when it is started again.

python examples/object_store.py run/store s3://bucket/corpus --steps 60     # with AWS_PROFILE, AWS_ENDPOINT_URL, …
python tests/s3lite.py run/buckets --port 9000          # a server to try it with, of the folder run/buckets/bucket
"""

from __future__ import annotations

import argparse
from pathlib import Path

import small_data
import torch
from torch import nn

import penstock

ROW, BATCH = 128, 8


def main() -> None:
    """Prepare what is not there yet, and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("url", help="such as s3://bucket/corpus")
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()

    text = small_data.text(arguments.folder)
    tokenizer = penstock.Tokenize(small_data.tokenizer(arguments.folder, text), append_eos=small_data.EOS)
    # Counting packed rows here (pack=) means that nobody has to fetch the length of every document later.
    print(penstock.prepare(text, arguments.url, transform=tokenizer, pack=ROW, shard_bytes=100_000))

    plan = penstock.open(arguments.url, cache=arguments.folder / "cache").shuffle(seed=7).pack(ROW).batch(BATCH)
    loader = penstock.DataLoader(plan)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(small_data.VOCABULARY, 32), nn.Linear(32, small_data.VOCABULARY))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    step, checkpoint = 0, arguments.folder / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["data"])
        step = saved["step"]
        print(f"going on at step {step}")
    for batch in loader:
        if step >= arguments.steps:
            break
        loss = nn.functional.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state | {"data": loader.state_dict()}, checkpoint)


if __name__ == "__main__":
    main()

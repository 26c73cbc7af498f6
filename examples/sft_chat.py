"""Fine-tune on conversations: the loss counts what the assistant said, and nothing else.

    python examples/sft_chat.py run/ --steps 30

`prepare` renders each conversation with the chat template and stores which tokens the assistant said; `pack` puts whole
conversations side by side and makes labels of them. In your own run, `chat_template=True` takes the tokenizer's own.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import small_data
import torch
import transformers

import penstock
from penstock.integrations.transformers import ModelLoader


def prepared(folder: Path) -> Path:
    """Conversations as tokens and loss masks."""
    if not (folder / "chat").exists():
        chat = small_data.conversations(folder)
        transform = penstock.Tokenize(small_data.tokenizer(folder, chat), chat_template=small_data.CHAT_TEMPLATE)
        penstock.prepare(chat, folder / "chat", transform=transform)
    return folder / "chat"


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()

    data = penstock.open(prepared(arguments.folder))
    train, validation = data.split({"train": 0.9, "validation": 0.1}, seed=7).values()
    plan = train.shuffle(seed=7).pack(128, labels="same").batch(4)
    ledger = plan.ledger()
    print(f"{len(train)} conversations in {plan.num_rows} rows, {ledger.fill:.1%} of all places filled")

    torch.manual_seed(0)
    configuration = transformers.LlamaConfig(
        vocab_size=small_data.VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    model = transformers.AutoModelForCausalLM.from_config(configuration)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    # Its batches are the model's own arguments: packed, with boundaries, no document sees another.
    with ModelLoader(plan, epochs=None) as loader:
        for step, batch in enumerate(loader):
            if step == arguments.steps:
                break
            loss = model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 10 == 0:
                print(f"step {step}: loss {loss.item():.3f}")

    model.eval()
    losses, targets = 0.0, 0
    with torch.no_grad(), ModelLoader(validation.pack(128, labels="same").batch(4, tail="even")) as loader:
        for batch in loader:
            num_targets = int((batch["labels"] != -100).sum())
            losses, targets = losses + model(**batch).loss.item() * num_targets, targets + num_targets
    print(f"validation loss {losses / targets:.3f} over {targets} tokens of the assistant")


if __name__ == "__main__":
    main()

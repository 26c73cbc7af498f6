"""Small plans and models that the frameworks train on, and versions to print."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import numpy as np
import torch

import penstock
from penstock.plan import Dataset, Plan

VOCABULARY = 101


def documents() -> Dataset:
    """Documents of random tokens, which pack into 22 rows of 32 tokens."""
    generator = np.random.default_rng(3)
    lengths = generator.integers(4, 30, 40)
    values = generator.integers(1, VOCABULARY, lengths.sum()).astype(np.uint16)
    return penstock.from_arrays({"tokens": penstock.Ragged(values, np.concatenate([[0], np.cumsum(lengths)]))})


def packed(global_size: int = 4) -> Plan:
    """22 rows in batches of 4: epochs of 6 batches and of 5, in turns."""
    return documents().shuffle(seed=5).pack(32).batch(global_size)


def expected(plan: Plan, num_steps: int, rank: int = 0, world_size: int = 1) -> list[list[int]]:
    """The tokens of the first steps of a run, each as one line, as the plan itself reads them."""
    size = plan.global_size
    return [plan.read_at(step * size, rank, world_size)["input_ids"].ravel().tolist() for step in range(num_steps)]


def shared_plans(**options: Any) -> dict[str, Plan]:
    """Batches that ranks share by cost, or of as many rows as a budget of tokens holds."""
    rows = documents().shuffle(seed=5)
    return {
        "packed, by attention": rows.pack(32).batch(4, balance="attention", **options),
        "padded, by tokens": rows.pad().batch(8, balance="tokens", **options),
        "as many as fit": rows.pad().batch(tokens=160, multiple=4, **options),
        "as many as fit, by attention": rows.pad(bucket=16, run=4).batch(
            tokens=240, multiple=4, balance="attention", **options
        ),
    }


def steps_of(plan: Plan, count: int, rank: int = 0, world_size: int = 1) -> list[list[int]]:
    """The tokens of the first steps of a run, however many rows each has."""
    found, row = [], 0
    for _ in range(count):
        found.append(plan.read_at(row, rank, world_size)["input_ids"].ravel().tolist())
        row = plan.steps.next_row(row)
    return found


def tiny_llama() -> Any:
    """A model of a few thousand parameters."""
    import transformers

    torch.manual_seed(0)
    configuration = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(configuration)


def tiny_tokenizer() -> Any:
    """Words that are numbers; the trainers ask for a tokenizer, and these tests for none."""
    import tokenizers
    import transformers

    words = tokenizers.models.WordLevel({str(number): number for number in range(VOCABULARY)}, unk_token="0")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), eos_token="2", pad_token="0"
    )


def note_inputs(model: torch.nn.Module) -> list[list[int]]:
    """A list to which every batch that the model trains on is added."""
    seen: list[list[int]] = []

    def note(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if module.training:
            seen.append(kwargs["input_ids"].ravel().tolist())

    model.register_forward_pre_hook(note, with_kwargs=True)
    return seen


def versions() -> str:
    """What the frameworks are, for the report of a test."""
    names = ("torch", "transformers", "trl", "lightning", "accelerate")
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)

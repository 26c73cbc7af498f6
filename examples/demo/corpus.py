"""The demo's data: Python's own source files, a tokenizer trained on them, the dataset, and the plan of its batches."""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np

import penstock
from penstock.cli import main as penstock_command

ROW, BATCH, SEED = 256, 8, 7
VOCABULARY, EOS = 4096, "<|eos|>"


def source_files() -> list[Path]:
    """Python's standard library: text that is on every machine."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return [file for file in sorted(root.rglob("*.py")) if "site-packages" not in file.parts and file.stat().st_size]


def train_tokenizer(path: Path) -> Path:
    """Train byte-level BPE on a quarter of the files."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[EOS],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (file.read_text(errors="replace") for file in source_files()[::4])
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))
    return path


def prepare(tokenizer: Path, destination: Path) -> Path:
    """Run `penstock prepare` on the files: documents end at two blank lines."""
    words = ["prepare", *map(str, source_files()), str(destination), "--tokenizer", str(tokenizer), "--append-eos", EOS]
    words += ["--format", "text", "--text-unit", "separator", "--separator", "\n\n\n", "--pack", str(ROW)]
    words += ["--on-error", "skip"]  # the standard library contains files that are not UTF-8, on purpose
    if code := penstock_command(words):
        sys.exit(code)
    return destination


def make_plan(path: Path) -> penstock.Plan:
    """The plan that the demo trains on."""
    return penstock.open(path).shuffle(seed=SEED).pack(ROW).batch(BATCH)


def digest_of(batch: dict[str, Any]) -> str:
    """A short name for the tokens of a batch."""
    return hashlib.blake2b(np.ascontiguousarray(batch["input_ids"]).tobytes(), digest_size=6).hexdigest()

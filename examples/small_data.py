"""Small data for the examples, made on the spot: text, conversations, photographs, a table. Nothing is downloaded.

Your own data takes the place of `text(folder)` and the others; everything after that line stays as it is.
"""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import numpy as np

VOCABULARY, EOS = 512, "<|eos|>"
CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|eos|>{% endfor %}"


def text(folder: Path, num_files: int = 20) -> Path:
    """JSON lines with a column `text`: paragraphs of Python's own source files."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:num_files]
    pieces = [piece for path in sources for piece in path.read_text(errors="replace").split("\n\n\n") if piece.strip()]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces))
    return folder / "text.jsonl"


def tokenizer(folder: Path, corpus: Path) -> Path:
    """A byte-level BPE of 512 tokens, trained on the corpus."""
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False
    )
    made.train([str(corpus)], trainer)
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def conversations(folder: Path, num: int = 200) -> Path:
    """JSON lines with a column `messages`: sums, asked and answered."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)
    with (folder / "chat.jsonl").open("w") as file:
        for _ in range(num):
            a, b = draw.integers(100, size=2).tolist()
            asked = {"role": "user", "content": f"What is {a} + {b}?"}
            file.write(json.dumps({"messages": [asked, {"role": "assistant", "content": f"It is {a + b}."}]}) + "\n")
    return folder / "chat.jsonl"


def photographs(folder: Path, num_per_class: int = 24) -> Path:
    """A folder of JPEG files per class: bright squares, and dark ones."""
    from PIL import Image

    draw = np.random.default_rng(0)
    for name, low in (("bright", 160), ("dark", 0)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(num_per_class):
            colour = tuple(draw.integers(low, low + 96, size=3).tolist())
            Image.new("RGB", (80, 60), colour).save(folder / name / f"{number:03}.jpg")
    return folder


def table(folder: Path, num_rows: int = 4000) -> Path:
    """A CSV file with columns x1, x2 and y, the larger of which decides y."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)
    rows = draw.random((num_rows, 2)).tolist()
    lines = [f"{a:.6f},{b:.6f},{int(a > b)}" for a, b in rows]
    (folder / "table.csv").write_text("\n".join(["x1,x2,y", *lines]) + "\n")
    return folder / "table.csv"

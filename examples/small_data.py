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


PICTURE_MARKS = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
_PICTURE_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content %}{% if p.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COLOURS = {"red": (220, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 220), "white": (240, 240, 240)}


def pictures(folder: Path, num: int = 200) -> tuple[Path, Path]:
    """JSON lines of questions about the colours of pictures beside them, and a processor: files as Qwen2-VL's has."""
    import tokenizers
    from PIL import Image

    (folder / "processor").mkdir(parents=True, exist_ok=True)
    draw, names = np.random.default_rng(0), list(COLOURS)
    with (folder / "chats.jsonl").open("w") as file:
        for number in range(num):
            parts, said = [], []
            for place in range(draw.integers(0, 4)):
                name, (width, height) = names[draw.integers(4)], draw.integers(28, 120, size=2).tolist()
                Image.new("RGB", (width, height), COLOURS[name]).save(folder / f"{number:04}-{place}.jpg")
                parts.append({"type": "image", "path": f"{number:04}-{place}.jpg"})
                said.append(name)
            asked = {"role": "user", "content": [*parts, {"type": "text", "text": "Which colours?"}]}
            answer = {"role": "assistant", "content": [{"type": "text", "text": " ".join(said) or "none"}]}
            file.write(json.dumps({"messages": [asked, answer]}) + "\n")
    made = tokenizers.Tokenizer.from_file(str(tokenizer(folder / "processor", folder / "chats.jsonl")))
    made.add_special_tokens(PICTURE_MARKS)
    made.save(str(folder / "processor" / "tokenizer.json"))
    config = {"processor_class": "Qwen2VLProcessor", "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
    config |= {"min_pixels": 28 * 28, "max_pixels": 84 * 84}
    (folder / "processor" / "preprocessor_config.json").write_text(json.dumps(config))
    (folder / "processor" / "chat_template.jinja").write_text(_PICTURE_TEMPLATE)
    return folder / "chats.jsonl", folder / "processor"

"""Small corpora, and what a prepared folder is compared by."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import penstock
from penstock.shards import read_manifest, read_provenance

WORDS = ["def", "return", "pen", "stock", "water", "naïve", "日本", "0x1f", "\n", "   ", "🙂", "e" * 30]


def write_jsonl(path: Path, num_rows: int, seed: int) -> list[str]:
    """A file of documents, and the documents."""
    rng = random.Random(seed)
    texts = [f"{path.stem} {row} " + " ".join(rng.choices(WORDS, k=rng.randint(0, 60))) for row in range(num_rows)]
    path.write_text("".join(json.dumps({"text": text, "id": row}) + "\n" for row, text in enumerate(texts)))
    return texts


def make_corpus(folder: Path, num_files: int = 6, num_rows: int = 200) -> list[str]:
    """Files of uneven size, and all their documents in order."""
    folder.mkdir(parents=True, exist_ok=True)
    texts: list[str] = []
    for number in range(num_files):
        texts += write_jsonl(folder / f"part-{number:03d}.jsonl", num_rows * (1 + number % 3), number)
    return texts


def contents(folder: Path) -> dict[str, str]:
    """Every file of a dataset by name and hash; run.json, which tells of time and host, aside."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != "run.json":
            found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def stray_files(folder: Path) -> set[str]:
    """Names in a dataset folder that do not belong there."""
    files = read_manifest(folder).file_names
    return {path.name for path in folder.iterdir()} - files - {"manifest.json", "run.json"}


def provenance(folder: Path) -> dict[str, Any]:
    """Where the samples of a dataset came from."""
    return read_provenance(folder, read_manifest(folder))


def decoded(folder: Path) -> list[str]:
    """Documents of a dataset of byte tokens."""
    return [bytes(sample["tokens"].astype("uint8")).decode() for sample in penstock.open(folder)]


def assert_holds(folder: Path, texts: list[str]) -> None:
    """Every document once, none lost, none doubled."""
    assert Counter(decoded(folder)) == Counter(texts)
    assert stray_files(folder) == set()
    assert penstock.verify(folder).is_sound

"""Raw text to shards of tokens: JSON lines, a byte-level BPE of 16,000, two workers, from the call to the last file."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import _material
from _turns import Peer, Question, Turn, run

NUM_BYTES, NUM_FILES, EOS = 64_000_000, 8, "<|eos|>"


def prepare(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    (folder / "text").mkdir()
    files = [open(folder / "text" / f"{number}.jsonl", "w", encoding="utf-8") for number in range(NUM_FILES)]  # noqa: SIM115
    for number, text in enumerate(_material.texts(NUM_BYTES)):
        files[number % NUM_FILES].write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    for file in files:
        file.close()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=16_000, special_tokens=[EOS], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(_material.texts(8_000_000), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


def documents(path: Path) -> Iterator[str]:
    for line in path.read_text(encoding="utf-8").splitlines():
        yield json.loads(line)["text"]


def turn(folder: Path, work: Callable[[Path], object]) -> Turn:
    """Megabytes of JSON lines a second; each turn writes a folder of its own."""
    num_bytes = sum(path.stat().st_size for path in (folder / "text").iterdir())

    def measure() -> float:
        out = folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        begin = time.perf_counter()
        work(out)
        return num_bytes / 1e6 / (time.perf_counter() - begin)

    return measure


def alone(folder: Path, arm: str) -> Turn:
    """Both tokenizers have threads of their own, and start with an empty memory of words, as everybody does."""
    texts = [list(documents(path)) for path in sorted((folder / "text").iterdir())]
    if arm == "gigatoken":
        import gigatoken

        encoded = [[text.encode() for text in each] for each in texts]

        def quickly(out: Path) -> None:
            tokenizer = gigatoken.Tokenizer(str(folder / "tokenizer.json"))
            for each in encoded:
                tokenizer.encode_batch(each, parallel=True)

        return turn(folder, quickly)
    from tokenizers import Tokenizer

    def slowly(out: Path) -> None:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        for each in texts:
            tokenizer.encode_batch_fast(each)

    return turn(folder, slowly)


def penstock(folder: Path, arm: str) -> Turn:
    import penstock

    tokenize = penstock.Tokenize(folder / "tokenizer.json", column="text", append_eos=EOS)
    source = str(folder / "text" / "*.jsonl")
    return turn(folder, lambda out: penstock.prepare(source, out, transform=tokenize, workers=2))


def hugging_face(folder: Path, arm: str) -> Turn:
    import datasets
    from tokenizers import Tokenizer

    datasets.disable_progress_bars()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id(EOS)

    def tokenize(rows: dict[str, list[str]]) -> dict[str, Any]:
        return {"input_ids": [[*each.ids, end] for each in tokenizer.encode_batch_fast(rows["text"])]}

    def work(out: Path) -> None:
        files = [str(path) for path in sorted((folder / "text").iterdir())]
        found = datasets.load_dataset("json", data_files=files, split="train", cache_dir=str(out / "cache"))
        workers = {"num_proc": 2} if arm == "2 processes" else {}
        mapped = found.map(tokenize, batched=True, remove_columns=["text"], **workers)
        mapped.save_to_disk(out / "saved")

    return turn(folder, work)


class Encode:
    """One file's documents as tensors, for LitData."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = str(folder / "tokenizer.json")

    def __call__(self, path: str) -> Iterator[Any]:
        import torch
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(self.tokenizer)
        end = tokenizer.token_to_id(EOS)
        for text in documents(Path(path)):
            yield torch.tensor([*tokenizer.encode(text).ids, end], dtype=torch.int32)


def litdata(folder: Path, arm: str) -> Turn:
    from litdata import TokensLoader, optimize

    files = [str(path) for path in sorted((folder / "text").iterdir())]
    options = {"chunk_bytes": "64MB", "num_workers": 2, "item_loader": TokensLoader(), "verbose": False}
    return turn(folder, lambda out: optimize(Encode(folder), files, str(out), **options))


def datatrove(folder: Path, arm: str) -> Turn:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    def work(out: Path) -> None:
        tokenizer = DocumentTokenizer(
            str(out / "tokens"), str(folder / "tokenizer.json"), eos_token=EOS, shuffle_documents=False
        )
        reader = JsonlReader(str(folder / "text"), glob_pattern="*.jsonl")
        LocalPipelineExecutor([reader, tokenizer], tasks=NUM_FILES, workers=2, logging_dir=str(out / "logs")).run()
        written = list((out / "tokens").glob("*.ds"))
        assert len(written) == NUM_FILES, f"{len(written)} files were written"

    return turn(folder, work)


QUESTION = Question(
    title="Raw text to shards",
    measures={"": "MB/s"},
    same="64 MB of Python's sources and documentation as JSON lines, a byte-level BPE of 16,000, an end of text behind "
    "every document, two workers; from the call to the last file, start-up included.",
    limit="The tokenizer alone on both cores: documents in memory, nothing kept.",
    why="Penstock tokenizes with gigatoken, whose result it compares with Hugging Face's tokenizers. The others use "
    "the latter, and make Python lists of its tokens. On little text, starting is most of Penstock's time.",
    prepare=prepare,
    rounds=2,
    limit_seconds=120,
    peers=(
        Peer("tokenizer alone", alone, ("gigatoken", "tokenizers"), "limit", ("gigatoken", "tokenizers")),
        Peer("Penstock", penstock, ("2 processes",), "ours", ("penstock-data",)),
        Peer("HF map", hugging_face, ("tokenizer's threads", "2 processes"), packages=("datasets",)),
        Peer("LitData", litdata, ("2 processes",), packages=("litdata",)),
        Peer("datatrove", datatrove, ("2 processes",), packages=("datatrove",)),
    ),
)

if __name__ == "__main__":
    run(QUESTION)

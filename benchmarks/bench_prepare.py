"""How much of gigatoken's own speed is left in `penstock prepare`, and where does the rest go?

    python benchmarks/bench_prepare.py                   400 MB, about a minute
    python benchmarks/bench_prepare.py --gigabytes 4     the real thing

Documents are the Python files of the standard library, copied with one word in fourteen changed, differently in
each copy, so that no cache of words helps; stored as parquet, as `penstock prepare` usually gets them. The tokenizer
is a byte-level BPE of 32,000. "gigatoken alone" has the same documents in memory as a list of bytes, keeps no result
and remembers words without a limit: the better of one process with two threads, and two processes with one. The two
take turns in each round. `penstock prepare` is the command, on two workers, with its start-up told apart; the time of
its workers is told by stage, and what they do beside tokenizing by its price for each GB of text. On a machine that
others use too, processor time is the steadier measure, and stands beside the other.
`datasets.map` with `tokenizers` and two processes gets some of the plain files, as they are in the library, and so
does `prepare`, for itself; both without their start-up, which for `datasets.map` is what a handful of documents takes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json
import pyarrow.parquet as pq
from _machine import print_result

EOS = "<|eos|>"
VOCAB_SIZE = 32_000
FILE_BYTES = 64_000_000
ROW_GROUP_BYTES = 8_000_000
CHANGED_SHARE = 14
ALONE_BATCH_BYTES = 32_000_000
WORKERS = 2


def read_library() -> list[str]:
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    texts = (file.read_bytes().decode("utf-8", "ignore") for file in files if "site-packages" not in file.parts)
    return [text for text in texts if text]


def train(texts: list[str], path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts[::2], trainer)
    tokenizer.save(str(path))


class Copies:
    """The library again and again, other words changed in each copy."""

    def __init__(self, texts: list[str], num_bytes: int) -> None:
        self._words = [text.split(" ") for text in texts]
        self._left = num_bytes
        self._rng = np.random.default_rng(0)

    def __iter__(self) -> Any:
        while self._left > 0:
            for words in self._words:
                text = self._edit(words)
                self._left -= len(text.encode())
                yield text
                if self._left <= 0:
                    return

    def _edit(self, words: list[str]) -> str:
        edited = list(words)
        places = self._rng.integers(0, len(words), len(words) // CHANGED_SHARE)
        endings = self._rng.integers(0, 26**4, len(places)).tolist()
        for place, ending in zip(places.tolist(), endings, strict=True):
            if edited[place]:
                edited[place] += chr(97 + ending % 26) + chr(97 + ending // 26 % 26) + chr(97 + ending // 676 % 26)
        return " ".join(edited)


def write_corpus(folder: Path, texts: list[str], num_bytes: int, kind: str) -> int:
    """Files of about 64 MB; the bytes of all documents."""
    total, waiting, size, number = 0, [], 0, 0
    for text in Copies(texts, num_bytes):
        waiting.append(text)
        size += len(text)
        if size >= FILE_BYTES:
            total += write_file(folder, number, waiting, kind)
            waiting, size, number = [], 0, number + 1
    return total + (write_file(folder, number, waiting, kind) if waiting else 0)


def write_file(folder: Path, number: int, texts: list[str], kind: str) -> int:
    path = folder / f"part-{number:04d}.{kind}"
    num_bytes = sum(len(text.encode()) for text in texts)
    if kind == "jsonl":
        path.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts))
    else:
        rows = max(1, len(texts) * ROW_GROUP_BYTES // num_bytes)
        pq.write_table(pa.table({"text": texts}), path, row_group_size=rows)
    return num_bytes


def load(path: Path) -> list[bytes]:
    table = pq.read_table(path) if path.suffix == ".parquet" else pyarrow.json.read_json(path)
    return [text.encode() for text in table["text"].to_pylist()]


def batches_of(documents: list[bytes]) -> list[list[bytes]]:
    batches: list[list[bytes]] = [[]]
    size = 0
    for document in documents:
        if size >= ALONE_BATCH_BYTES:
            batches.append([])
            size = 0
        batches[-1].append(document)
        size += len(document)
    return batches


def encode_alone(tokenizer: str, paths: list[str], parallel: bool, begin_at: float) -> tuple[float, float, float]:
    """When gigatoken began and ended with these documents, and its processor time; all processes begin together."""
    import gigatoken

    engine = gigatoken.Tokenizer(tokenizer)
    engine.encode_batch([b"warm up"], parallel=parallel)
    loaded = [batches_of(load(Path(path))) for path in paths]
    time.sleep(max(0.0, begin_at - time.time()))
    begin, processor = time.time(), time.process_time()
    for batches in loaded:
        for batch in batches:
            engine.encode_batch(batch, parallel=parallel)
    return begin, time.time(), time.process_time() - processor


def time_alone(tokenizer: Path, paths: list[Path], num_processes: int, load_seconds: float) -> tuple[float, float]:
    """Seconds that gigatoken alone takes for all documents on two cores, and its processor time."""
    parts = [[str(path) for path in paths[number::num_processes]] for number in range(num_processes)]
    begin_at = time.time() + load_seconds / num_processes + 3
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        runs = [pool.submit(encode_alone, str(tokenizer), part, num_processes == 1, begin_at) for part in parts]
        spans = [run.result() for run in runs]
    seconds = max(end for _, end, _ in spans) - min(begin for begin, _, _ in spans)
    return seconds, sum(processor for _, _, processor in spans)


def time_prepare(source: str, destination: Path, tokenizer: Path) -> dict[str, Any]:
    """The summary of the command."""
    flags = [
        "--tokenizer",
        str(tokenizer),
        "--column",
        "text",
        "--append-eos",
        EOS,
        "--workers",
        str(WORKERS),
        "--json",
    ]
    command = [sys.executable, "-m", "penstock.cli", "prepare", source, str(destination), *flags]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    shutil.rmtree(destination)
    summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return summary


def compare_plain(texts: list[str], tokenizer: Path, num_bytes: int, folder: Path) -> dict[str, float]:
    """Both on the library's files as they are; `prepare` on all of them, `datasets.map` on the first of them."""
    (folder / "plain").mkdir(exist_ok=True)
    total = write_file(folder / "plain", 0, texts, "parquet")
    run = time_prepare(f"{folder}/plain/*", folder / "data", tokenizer)
    own = total / 1e6 / (run["seconds"]["work"] + run["seconds"]["commit"])
    with tempfile.TemporaryDirectory() as cache:  # a result of an earlier run would be found, and taken
        rate = time_datasets(texts, tokenizer, num_bytes, Path(cache))
    return {
        "plain files: prepare, MB/s": own,
        "plain files: datasets.map with tokenizers, MB/s": rate,
        "plain files: prepare against datasets.map": own / rate,
    }


def time_datasets(texts: list[str], tokenizer: Path, num_bytes: int, cache: Path) -> float:
    """MB/s of `datasets.map` with `tokenizers` on two processes, start-up taken off."""
    import datasets
    from tokenizers import Tokenizer

    datasets.disable_progress_bars()
    engine = Tokenizer.from_file(str(tokenizer))
    chosen = texts[: int(np.searchsorted(np.cumsum([len(text) for text in texts]), num_bytes)) + 1]

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"tokens": [each.ids for each in engine.encode_batch_fast(batch["text"])]}

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    seconds = []
    for name, part in (("few", chosen[:4]), ("all", chosen)):
        table = datasets.Dataset.from_dict({"text": part})
        begin = time.perf_counter()
        file = str(cache / f"{name}.arrow")
        table.map(encode, batched=True, num_proc=WORKERS, remove_columns=["text"], cache_file_name=file)
        seconds.append(time.perf_counter() - begin)
    return sum(len(text.encode()) for text in chosen) / 1e6 / (seconds[1] - seconds[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=0.4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--format", choices=("parquet", "jsonl"), default="parquet")
    parser.add_argument("--slice-megabytes", type=float, default=20, help="for datasets.map; 0 leaves it out")
    parser.add_argument("--folder", type=Path, help="where the corpus is kept, for other runs (default: nowhere)")
    arguments = parser.parse_args()
    if arguments.folder is not None:
        figures = measure(arguments.folder, arguments)
    else:
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
            figures = measure(Path(folder), arguments)
    settings = {
        "gigabytes": arguments.gigabytes,
        "format": arguments.format,
        "workers": WORKERS,
        "vocabulary": VOCAB_SIZE,
    }
    print_result("penstock prepare against gigatoken alone", settings, figures, "gigatoken", "pyarrow", "tokenizers")


def find_corpus(folder: Path, texts: list[str], arguments: argparse.Namespace) -> tuple[list[Path], int]:
    """The files of the corpus and the bytes of its documents; made, unless an earlier run has left it."""
    corpus, note = folder / "corpus", folder / "corpus.json"
    wanted = {"gigabytes": arguments.gigabytes, "format": arguments.format}
    found = json.loads(note.read_text()) if note.exists() else {}
    if {name: found.get(name) for name in wanted} != wanted:
        shutil.rmtree(corpus, ignore_errors=True)
        corpus.mkdir(parents=True)
        train(texts, folder / "tokenizer.json")
        found = {**wanted, "bytes": write_corpus(corpus, texts, int(arguments.gigabytes * 1e9), arguments.format)}
        note.write_text(json.dumps(found))
    return sorted(corpus.iterdir()), found["bytes"]


def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    texts, tokenizer = read_library(), folder / "tokenizer.json"
    paths, num_bytes = find_corpus(folder, texts, arguments)
    begin = time.perf_counter()
    load(paths[0])
    load_seconds = (time.perf_counter() - begin) * len(paths) + 2
    alone: dict[int, list[tuple[float, float]]] = {1: [], 2: []}
    runs: list[dict[str, Any]] = []
    for _ in range(arguments.rounds):
        for num_processes, times in alone.items():
            times.append(time_alone(tokenizer, paths, num_processes, load_seconds))
        runs.append(time_prepare(f"{folder}/corpus/*", folder / "data", tokenizer))
    figures = summarise(num_bytes, alone, runs)
    if arguments.slice_megabytes:
        figures |= compare_plain(texts, tokenizer, int(arguments.slice_megabytes * 1e6), folder)
    return figures


def summarise(
    num_bytes: int, alone: dict[int, list[tuple[float, float]]], runs: list[dict[str, Any]]
) -> dict[str, Any]:
    megabytes = num_bytes / 1e6
    walls = {count: statistics.median(seconds for seconds, _ in times) for count, times in alone.items()}
    processor = min(statistics.median(spent for _, spent in times) for times in alone.values())
    own = statistics.median(sum(run["processor_seconds"].values()) for run in runs)
    busy = statistics.median(run["seconds"]["work"] + run["seconds"]["commit"] for run in runs)
    figures = {
        "documents, MB": megabytes,
        "gigatoken alone, 2 threads, MB/s": megabytes / walls[1],
        "gigatoken alone, 2 processes, MB/s": megabytes / walls[2],
        "prepare, MB/s": megabytes / busy,
        "prepare as a share of gigatoken alone": min(walls.values()) / busy,
        "gigatoken alone, MB per second of processor time": megabytes / processor,
        "prepare, MB per second of processor time": megabytes / own,
        "share in processor time": processor / own,
        "start-up of prepare, s": statistics.median(run["seconds"]["start_up"] for run in runs),
        "commit, s": statistics.median(run["seconds"]["commit"] for run in runs),
    }
    median = sorted(runs, key=lambda run: run["seconds"]["work"])[len(runs) // 2]
    figures |= explain_rest(num_bytes / 1e9, processor, median)
    figures["memory of a worker at most, MB"] = max(run["peak_worker_bytes"] for run in runs) / 1e6
    return figures


def explain_rest(gigabytes: float, alone: float, run: dict[str, Any]) -> dict[str, float]:
    """Where the workers' time went by the clock, and what each stage cost in processor time, a GB of text."""
    clock, spent, total = run["worker_seconds"], run["processor_seconds"], WORKERS * run["seconds"]["work"]
    figures = {f"workers: {name}, % of their time": 100 * seconds / total for name, seconds in clock.items()}
    figures["workers: idle or starting, % of their time"] = 100 * (1 - sum(clock.values()) / total)
    figures["processor s per GB: gigatoken alone"] = alone / gigabytes
    figures["processor s per GB: read, decompress, check"] = spent["read"] / gigabytes
    figures["processor s per GB: tokenize, EOS, spot checks"] = spent["transform"] / gigabytes
    figures["processor s per GB: copy, checksum, write, sync"] = spent["write"] / gigabytes
    return figures


if __name__ == "__main__":
    main()

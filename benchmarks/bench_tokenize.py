"""How much of gigatoken's own speed is left inside the transform `Tokenize`, and where does the rest go?

    python benchmarks/bench_tokenize.py            about 80 seconds on one core

Documents are the Python files of the standard library, several times over with other endings of longer words, so
that no cache of words helps; in batches of 4 MB, as sources give them. "gigatoken alone" gets each batch as a list
of bytes made outside the clock, in the calling thread. Both have an instance of their own, and take turns going
first. Start-up (loading, comparing with the reference) stands apart. The tokenizer is a byte-level BPE of 32,000.

"new words" is text in which no word ever comes back, the worst case for gigatoken, which remembers every word: peak
memory and speed of a process that reloads it after growing too much, as workers do, and of one that never does.
"""

from __future__ import annotations

import multiprocessing
import re
import sysconfig
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import gigatoken
import numpy as np
import pyarrow as pa
from _machine import print_result
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from penstock.sources import Records
from penstock.transforms import Tokenize, _tokenizer_engines
from penstock.transforms._tokenize_rows import TokenMaker
from penstock.transforms._tokenizer_source import load_tokenizer
from penstock.transforms._transform import BadRows, read_text

EOS = "<|eos|>"
VOCAB_SIZE = 32_000
BATCH_BYTES = 4 << 20
NUM_COPIES = 6
SHORT_BYTES = 300
LONG_WORD = re.compile(r"[a-z]{6,}")
REFERENCE_BYTES = 4 << 20
NEW_WORDS, WORD_BYTES = 14_000_000, 8


def read_library() -> list[str]:
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    texts = (file.read_bytes().decode("utf-8", "ignore") for file in files if "site-packages" not in file.parts)
    return [text for text in texts if text]


def train(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts[::2], trainer)
    return tokenizer


def edit(texts: list[str], copy: int) -> list[str]:
    """The same files with another ending for every longer word: words that no cache has seen."""
    ending = chr(97 + copy // 26) + chr(97 + copy % 26)
    return [LONG_WORD.sub(rf"\g<0>{ending}", text) for text in texts] if copy else texts


def cut_short(texts: list[str]) -> list[str]:
    return [text[begin : begin + SHORT_BYTES] for text in texts for begin in range(0, len(text), SHORT_BYTES)]


def make_batches(texts: list[str]) -> Iterator[Records]:
    begin, size = 0, 0
    for end, text in enumerate(texts, 1):
        size += len(text)
        if size >= BATCH_BYTES or end == len(texts):
            yield Records({"text": pa.array(texts[begin:end], pa.large_string())}, begin, end - begin)
            begin, size = end, 0


def seconds_of(work: Callable[[], object]) -> NDArray[np.float64]:
    """Seconds by the clock, and of this process's own time: the second says more on a machine that is shared."""
    started = np.array([time.perf_counter(), time.process_time()])
    work()
    return np.array([time.perf_counter(), time.process_time()]) - started


def make_work(texts: list[str], copies: range) -> list[tuple[list[Records], list[list[bytes]]]]:
    """Batches of each copy, for the transform and for gigatoken; made first, lest growing look like a full cache."""
    made = []
    for copy in copies:
        batches = list(make_batches(edit(texts, copy)))
        made.append((batches, [[text.encode() for text in batch.columns["text"].to_pylist()] for batch in batches]))
    return made


def compare(opened: Any, alone: Any, work: list[tuple[list[Records], list[list[bytes]]]]) -> dict[str, float]:
    """MB/s of both over edited copies, in turn, with the same documents."""
    num_bytes, spent = 0, {"transform": np.zeros(2), "gigatoken": np.zeros(2)}
    for turn, (batches, lists) in enumerate(work):
        num_bytes += sum(len(document) for documents in lists for document in documents)
        calls = {
            "transform": lambda batches=batches: [opened(batch) for batch in batches],
            "gigatoken": lambda lists=lists: [alone.encode_batch(documents, parallel=False) for documents in lists],
        }
        for name in list(calls)[:: 1 if turn % 2 else -1]:
            spent[name] += seconds_of(calls[name])
    return {
        "transform MB/s": float(num_bytes / 1e6 / spent["transform"][0]),
        "gigatoken alone MB/s": float(num_bytes / 1e6 / spent["gigatoken"][0]),
        "share of gigatoken, by the clock": float(spent["gigatoken"][0] / spent["transform"][0]),
        "share of gigatoken, by processor time": float(spent["gigatoken"][1] / spent["transform"][1]),
    }


def time_parts(transform: Tokenize, texts: list[str]) -> dict[str, float]:
    """Milliseconds of each part for one batch of about 4 MB, best of 7."""
    batch = next(make_batches(texts))
    maker: TokenMaker = transform.open()._maker  # type: ignore[attr-defined]
    rows = read_text(batch, "text", BadRows(batch))
    places = np.arange(len(rows))
    ids, offsets = maker.encode(rows, batch, places)
    parts: dict[str, Callable[[], object]] = {
        "read the column, ms": lambda: read_text(batch, "text", BadRows(batch)),
        "encode and choose what to check, ms": lambda: maker.encode(rows, batch, places),
        "EOS and dtype, ms": lambda: maker.frame(ids, offsets),
    }
    return {name: 1e3 * min(float(seconds_of(work)[0]) for _ in range(7)) for name, work in parts.items()}


def tokenize_new_words(tokenizer: bytes, is_reloaded: bool) -> dict[str, float]:
    """Peak memory and speed of a fresh process that meets only new words."""
    if not is_reloaded:
        _tokenizer_engines._MAX_GROWTH_BYTES = 1 << 60
    engine = _tokenizer_engines.GigatokenEngine(load_tokenizer(Tokenizer.from_buffer(tokenizer)))
    rng, spent, per_batch = np.random.default_rng(7), np.zeros(2), BATCH_BYTES // WORD_BYTES
    for _ in range(NEW_WORDS // per_batch):
        letters = rng.integers(ord("a"), ord("z") + 1, (per_batch, WORD_BYTES), np.uint8)
        letters[:, 0] = ord(" ")
        spent += seconds_of(lambda letters=letters: engine.encode(letters.reshape(-1), np.array([0, letters.size])))
    # Not ru_maxrss: a process that another one starts begins with the peak of its parent.
    peak_bytes = int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10  # type: ignore[index]
    return {
        "peak memory, MB": peak_bytes / 1e6,
        "MB per second of processor time": 1e-6 * WORD_BYTES * NEW_WORDS / spent[1],
    }


def compare_reloading(tokenizer: Tokenizer) -> dict[str, float]:
    figures = {}
    for is_reloaded in (True, False):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            measured = pool.submit(tokenize_new_words, tokenizer.to_str().encode(), is_reloaded).result()
        name = "new words, reloaded" if is_reloaded else "new words, never reloaded"
        figures |= {f"{name}: {key}": value for key, value in measured.items()}
    return figures


def measure_reference(tokenizer: Tokenizer, texts: list[str]) -> float:
    chosen = texts[: int(np.searchsorted(np.cumsum([len(text) for text in texts]), REFERENCE_BYTES))]
    seconds, _ = seconds_of(lambda: tokenizer.encode_batch_fast(chosen, add_special_tokens=False))
    return float(sum(len(text.encode()) for text in chosen) / 1e6 / seconds)


def main() -> None:
    texts = read_library()
    tokenizer = train(texts)
    transform = Tokenize(tokenizer, append_eos=EOS)
    works = {
        "files": make_work(texts, range(1, NUM_COPIES + 1)),
        "short documents": make_work(cut_short(texts), range(NUM_COPIES + 1, NUM_COPIES + 3)),
    }
    figures: dict[str, Any] = {}
    started = time.perf_counter()
    transform = transform.before_run(make_batches(texts))
    figures["start-up: compare with the reference, s"] = time.perf_counter() - started
    started = time.perf_counter()
    opened = transform.open()
    figures["start-up: open in a worker, s"] = time.perf_counter() - started
    started = time.perf_counter()
    opened._maker.reference.encode(np.frombuffer(b"a", np.uint8), np.array([0, 1]))  # type: ignore[attr-defined]
    figures["start-up: reference, at the first check, s"] = time.perf_counter() - started
    alone = gigatoken.Tokenizer(tokenizer)
    alone.encode_batch([b"warm up"], parallel=False)
    for name, work in works.items():
        figures |= {f"{name}: {key}": value for key, value in compare(opened, alone, work).items()}
    figures |= time_parts(transform, texts)
    figures |= compare_reloading(tokenizer)
    figures["tokenizers library, all cores, MB/s"] = measure_reference(tokenizer, texts)
    figures["engine"] = transform.engine_used
    settings = {"documents": len(texts), "copies": NUM_COPIES, "vocab_size": VOCAB_SIZE, "batch_bytes": BATCH_BYTES}
    question = "How much of gigatoken's speed is left inside Tokenize?"
    print_result(question, settings, figures, "gigatoken", "tokenizers", "pyarrow")


if __name__ == "__main__":
    main()

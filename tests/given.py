"""The data that pages of the documentation take for granted, made in the current folder."""

from __future__ import annotations

import io
import json
import struct
import sys
import sysconfig
import tarfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

import penstock


@cache
def some_texts() -> list[str]:
    """Documents of many lengths: the first modules of the standard library."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
    return [file.read_text(errors="replace")[:20_000] for file in files]


def texts() -> None:
    """`texts/`: a text file for each document."""
    Path("texts").mkdir()
    for number, text in enumerate(some_texts()):
        Path(f"texts/{number:03}.txt").write_text(text)


def corpus() -> None:
    """`corpus/*.parquet`, with text, source and language; `corpus/a.jsonl` with labels."""
    Path("corpus").mkdir()
    for name, part in (("a", some_texts()[:30]), ("b", some_texts()[30:])):
        columns = {"text": part, "source": [name] * len(part), "lang": ["en", "fr"] * (len(part) // 2)}
        pq.write_table(pa.table(columns), f"corpus/{name}.parquet")
    lines = [json.dumps({"label": number, "text": f"line {number}"}) + "\n" for number in range(500)]
    Path("corpus/a.jsonl").write_text("".join(lines))


@cache
def _tokenizer() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|eos|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(some_texts()[:5], trainer)
    text: str = tokenizer.to_str()
    return text


def tokenizer() -> None:
    """`tokenizer.json`: a small BPE with an EOS token and those of ChatML."""
    Path("tokenizer.json").write_text(_tokenizer())


def photos() -> None:
    """`photos/cat`, `photos/dog`: JPEGs of several sizes."""
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        Path("photos", name).mkdir(parents=True)
        for number in range(40):
            height, width = rng.integers(70, 120, 2)
            pixels = rng.integers(0, 255, (height // 10, width // 10, 3), dtype=np.uint8)
            Image.fromarray(pixels).resize((int(width), int(height))).save(f"photos/{name}/{number:03}.jpg")


def films() -> None:
    """`films/ball`, `films/box`: films in MP4; `sounds/high`, `sounds/low`: sounds in FLAC."""
    import av
    import numpy as np

    for number in range(4):
        kind, pitch = ("ball", "low") if number % 2 else ("box", "high")
        for folder in (f"films/{kind}", f"sounds/{pitch}"):
            Path(folder).mkdir(parents=True, exist_ok=True)
        with av.open(f"films/{kind}/{number}.mp4", "w") as out:
            stream = out.add_stream("libx264", rate=30)
            stream.width, stream.height, stream.pix_fmt, stream.gop_size = 96, 64, "yuv420p", 15
            for step in range(45):
                pixels = np.full((64, 96, 3), 40 * number, np.uint8)
                pixels[16:48, step : step + 32] = 255
                out.mux(stream.encode(av.VideoFrame.from_ndarray(pixels)))
            out.mux(stream.encode(None))
        time = np.arange(16_000) / 16_000
        samples = (20_000 * np.sin(2 * np.pi * 110 * (number + 1) * time)).astype(np.int16)
        with av.open(f"sounds/{pitch}/{number}.flac", "w") as out:
            stream = out.add_stream("flac", rate=16_000, layout="mono")
            frame = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
            frame.sample_rate = 16_000
            cut = av.AudioResampler(format="s16", frame_size=1024)
            for part in [*cut.resample(frame), *cut.resample(None)]:
                out.mux(stream.encode(part))
            out.mux(stream.encode(None))


def tokens() -> None:
    """`data/corpus`: a prepared dataset of tokens."""
    rng = np.random.default_rng(0)
    with penstock.DatasetWriter("data/corpus", {"tokens": "uint16[*]"}) as writer:
        writer.write_batch({"tokens": [rng.integers(1, 300, length) for length in rng.integers(20, 800, 800)]})


def chats() -> None:
    """`chats.jsonl`: conversations of two turns."""
    turns = [(f"What is {number} + 1?", f"It is {number + 1}.") for number in range(60)]
    said = [[{"role": "user", "content": one}, {"role": "assistant", "content": two}] for one, two in turns]
    Path("chats.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in said))


def picture_chats() -> None:
    """`chats.jsonl`: conversations about the pictures in `photos`; `qwen/`: files as a processor of Qwen2-VL has."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
    try:
        import small_data
    finally:
        sys.path.pop(0)
    chats, processor = small_data.pictures(Path("photos"))
    chats.rename("chats.jsonl")
    processor.rename("qwen")


def table() -> None:
    """`table.csv`: numbers and text, and a few missing values."""
    lines = [f"{20 + number % 40},Paris,{'' if number % 50 == 3 else number / 7:.4}\n" for number in range(200)]
    Path("table.csv").write_text("age,city,score\n" + "".join(lines))


def tars() -> None:
    """`tars/*.tar`: an image, a class and a caption for each key."""
    Path("tars").mkdir()
    for shard in range(2):
        with tarfile.open(f"tars/{shard:03}.tar", "w") as tar:
            for number in range(12):
                pixels = io.BytesIO()
                Image.fromarray(np.full((40, 50, 3), number * 9, np.uint8)).save(pixels, "JPEG")
                caption = json.dumps({"caption": f"picture {number}"}).encode()
                members = {"jpg": pixels.getvalue(), "cls": str(number % 3).encode(), "json": caption}
                for extension, data in members.items():
                    member = tarfile.TarInfo(f"{shard}{number:04}.{extension}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))


def saved() -> None:
    """`tokenised`: a dataset of Hugging Face's library, saved."""
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5]] * 20}).save_to_disk("tokenised")


def megatron() -> None:
    """`corpus_text_document.bin` and `.idx`: 300 documents of uint16."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(20, 200, 300).astype("<i4")
    rng.integers(1, 300, lengths.sum()).astype("<u2").tofile("corpus_text_document.bin")
    starts = ((np.cumsum(lengths) - lengths) * 2).astype("<i8")
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(lengths), len(lengths) + 1)
    documents = np.arange(len(lengths) + 1, dtype="<i8")
    Path("corpus_text_document.idx").write_bytes(header + lengths.tobytes() + starts.tobytes() + documents.tobytes())


_ALL = (texts, corpus, tokenizer, photos, films, tokens, chats, picture_chats, table, tars, saved, megatron)
GIVEN: dict[str, Callable[[], None]] = {each.__name__: each for each in _ALL}

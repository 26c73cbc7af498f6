"""Small real tokenizers, trained once per process, and records to feed transforms with."""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import tiktoken
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from penstock.schema import Ragged
from penstock.sources import Records, RowError
from penstock.transforms import Output

EOS, BOS, PAD = "<|eos|>", "<|bos|>", "<|pad|>"
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)


@functools.cache
def library_texts() -> tuple[str, ...]:
    return tuple(inspect.getsource(module) for module in (argparse, ast, inspect, functools, json))


@functools.cache
def tokenizer_json(vocab_size: int = 1000) -> str:
    """A byte-level BPE trained on a little Python source."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS, BOS, PAD, "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(library_texts(), trainer)
    tokenizer.add_tokens([AddedToken("penstock", normalized=False)])
    return str(tokenizer.to_str())


def hf_tokenizer() -> Tokenizer:
    return Tokenizer.from_str(tokenizer_json())


def normalizing_json() -> str:
    """A tokenizer that gigatoken and `tokenizers` may well read differently: it lowercases first."""
    content = json.loads(tokenizer_json())
    content["normalizer"] = json.loads(str_of_normalizer())
    return json.dumps(content)


def str_of_normalizer() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase()])
    return json.dumps(json.loads(tokenizer.to_str())["normalizer"])


def write_tokenizer(folder: Path) -> Path:
    path = folder / "tokenizer.json"
    path.write_text(tokenizer_json())
    return path


def write_hf_folder(folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": EOS}, "bos_token": BOS, **config})
    )
    return folder


@functools.cache
def tiktoken_encoding() -> tiktoken.Encoding:
    """A real BPE with cl100k's splitting, trained by tiktoken's own teaching code on a little source."""
    from tiktoken._educational import bpe_train

    ranks = bpe_train(data=library_texts()[4][:20_000], vocab_size=300, pat_str=CL100K, visualise=None)
    return tiktoken.Encoding(
        "tiny", pat_str=CL100K, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": len(ranks)}
    )


def texts_around(names: Iterable[str]) -> list[str]:
    """Texts that spell out these tokens, whole, cut and joined, and some that tokenizers stumble over."""
    tokens = list(names)[:64]
    around = ("{0}", "{0}{0}", " {0} ", "a{0}b", "a {0} b", "\n{0}\n", "{0}'s", "é{0}字", "<{0}>", "  {0}\t{0}")
    spelled = [pattern.format(token) for token in tokens for pattern in around]
    cut = [token[:-1] for token in tokens] + [token.swapcase() for token in tokens]
    known = ["<|endoftext|>", "<s></s><unk><pad>", "[CLS] [SEP] [MASK]", "<|im_start|>user\nhi<|im_end|>", "<|", "|>"]
    hard = [
        "",
        " ",
        "\n",
        "\x00",
        "a\r\nb",
        "\u0301 alone",
        "naïve café 日本語 👨‍👩‍👧‍👦",
        "▁▁a▁b",
        "Ġthe Ċ Ā ð",
        "<0x0A><0xFF>",
    ]
    return [*hard, *known, *spelled, *cut, "".join(tokens), " ".join(tokens), "a" * 20_000, " " * 20_000, "字" * 5_000]


def make_records(columns: dict[str, Any], first_row: int = 0, bad_rows: Sequence[int] = ()) -> Records:
    errors = tuple(RowError("", row, "bad_json", "it is not JSON") for row in bad_rows)
    return Records(columns, first_row, len(next(iter(columns.values()))), errors)


def text_records(texts: Sequence[str | None], first_row: int = 0) -> Records:
    return make_records({"text": pa.array(texts, pa.large_string())}, first_row)


def token_lists(output: Output) -> list[list[int]]:
    tokens = output.columns["tokens"]
    assert isinstance(tokens, Ragged)
    return [np.asarray(document).tolist() for document in tokens]


def reasons(output: Output) -> list[tuple[int, str]]:
    return [(error.row, error.reason) for error in output.errors]

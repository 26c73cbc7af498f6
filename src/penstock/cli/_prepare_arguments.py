"""The arguments of `penstock prepare`: every setting of the library has a flag of the same name."""

from __future__ import annotations

import argparse
from typing import Any

from penstock.cli import _values


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("sources", nargs="+", metavar="SRC", help="files, globs, folders or URLs")
    parser.add_argument("destination", metavar="DEST", help="folder of the dataset")
    _add_transform_arguments(parser)
    _add_reading_arguments(parser)
    _add_writing_arguments(parser)


def _add_writing_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what is written")
    what.add_argument(
        "--shuffle",
        type=_values.seed,
        default="auto",
        metavar="SEED",
        help="permute all documents by this seed (default: only what would come class by class)",
    )
    what.add_argument(
        "--no-shuffle", dest="shuffle", action="store_const", const=None, help="keep the order of the sources"
    )
    what.add_argument(
        "--pack", type=int, action="append", default=[], metavar="LENGTH", help="count packed rows of this length"
    )
    what.add_argument(
        "--split",
        type=_values.shares,
        metavar="NAME=SHARE,…",
        help="write parts, such as val=0.02, as datasets DEST/val and DEST/train; a sample never changes its part",
    )
    what.add_argument("--split-seed", type=int, default=0, metavar="SEED", help="a different seed, a different split")
    what.add_argument(
        "--split-by",
        type=_values.names,
        default=("content",),
        metavar="content|file|NAME,…",
        help="what decides a sample's part: its content (the default), its file, or columns",
    )
    what.add_argument("--limit", type=_values.count, metavar="N", help="make only the first N samples, for a trial")
    what.add_argument(
        "--shard-bytes",
        type=_values.size,
        default=256 << 20,
        metavar="SIZE",
        help="size of a shard, such as 256MB (default: 256MiB)",
    )
    what.add_argument(
        "--origins",
        choices=("auto", "manifest", "column"),
        default="auto",
        help="where to keep the file and row of each sample",
    )
    _add_rerun_arguments(parser.add_argument_group("if DEST exists (default: continue, or add what is new)"))
    _add_run_arguments(parser.add_argument_group("how it runs"))


def _add_rerun_arguments(again: Any) -> None:
    again.add_argument("--overwrite", action="store_true", help="replace a dataset made with different settings")
    again.add_argument(
        "--append", action="store_true", help="add the sources to those of the dataset, which need not be given again"
    )
    again.add_argument(
        "--remove", action="store_true", help="remove the samples of source files that are no longer given"
    )


def _add_run_arguments(how: Any) -> None:
    how.add_argument(
        "--workers",
        type=_values.workers,
        default="auto",
        metavar="N",
        help="number of processes (default: one per core)",
    )
    how.add_argument("--on-error", choices=("raise", "skip"), default="raise", help="stop at a bad row, or skip it")
    how.add_argument(
        "--max-skipped",
        type=_values.rows_or_share,
        metavar="N|SHARE",
        help="most rows to skip: a number, or a share such as 0.5 or 50%% (default: 10%%, but at least ten rows)",
    )
    how.add_argument("--engine", choices=("local", "ray"), default="local", help="where tasks run")
    how.add_argument("--address", metavar="HOST:PORT", help="Ray cluster (default: one on this machine)")


def _add_transform_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("how rows become samples (default: keep their columns)")
    what.add_argument("--tokenizer", metavar="PATH", help="tokenizer.json, a folder, tiktoken:NAME, or bytes")
    what.add_argument(
        "--column", metavar="NAME", help="column with the text or the images; a.b is the field b of the column a"
    )
    what.add_argument("--append-eos", metavar="TOKEN", help="token to put at the end of each document")
    what.add_argument("--prepend-bos", metavar="TOKEN", help="token to put at the start of each document")
    what.add_argument(
        "--keep", action="append", default=[], metavar="NAME", help="another column to store (repeatable)"
    )
    _add_chat_arguments(parser.add_argument_group("conversations, with --tokenizer"))
    what.add_argument(
        "--special-tokens",
        choices=("text", "count", "refuse", "allow"),
        help="special tokens spelled out in a text: encode them as text (the default), also count them, refuse the "
        "row, or let them control the model",
    )
    what.add_argument(
        "--image-size", type=_values.image_size, metavar="SIZE", help="pixels, such as 224 or 256x192 (height x width)"
    )
    what.add_argument(
        "--image-mode", choices=("resize", "crop", "keep"), help="how to fit images to the size (default: resize)"
    )
    what.add_argument("--image-store", choices=("pixels", "jpeg", "as_is"), help="what to store (default: pixels)")
    what.add_argument("--function", metavar="MODULE:NAME", help="a Python function of a batch")


def _add_chat_arguments(chat: Any) -> None:
    chat.add_argument(
        "--chat-format",
        choices=("messages", "sharegpt", "prompt", "preference"),
        help="how rows hold conversations: messages, ShareGPT's layout, columns prompt and completion, or columns "
        "chosen and rejected (which include the prompt, unless --column names the prompt's column)",
    )
    chat.add_argument(
        "--chat-template",
        metavar="PATH|own",
        help="Jinja template, or the tokenizer's own, which messages and sharegpt use by default",
    )
    chat.add_argument("--tools-column", metavar="NAME", help="column with the tools of a conversation")
    chat.add_argument("--template-date", metavar="YYYY-MM-DD", help="today's date, for templates that use it")
    chat.add_argument(
        "--template-values",
        type=_values.json_object,
        metavar="JSON",
        help='more variables, as in {"enable_thinking": false}',
    )
    chat.add_argument(
        "--loss-on",
        choices=("assistant", "last", "none"),
        help="store a loss mask of all of the assistant's turns (the default), of the last, or none",
    )


def _add_reading_arguments(parser: argparse.ArgumentParser) -> None:
    how = parser.add_argument_group("how to read the sources")
    how.add_argument("--format", metavar="NAME", help="parquet, jsonl, csv, text, images, audio, webdataset, arrow")
    how.add_argument("--text-unit", choices=("file", "line", "separator"), help="what is one document of a text file")
    how.add_argument("--separator", metavar="TEXT", help="text between two documents of a text file")
    how.add_argument(
        "--delimiter", type=_values.delimiter, metavar="CHARACTER", help="character between two fields of a CSV file"
    )
    how.add_argument(
        "--classes",
        metavar="FILE|DATASET",
        help="names of image classes in the order of their labels: a file with one per line, or another dataset",
    )
    how.add_argument(
        "--header",
        action=argparse.BooleanOptionalAction,
        help="whether the first line of a CSV file names its columns; needed if that is unclear",
    )
    how.add_argument(
        "--names", type=_values.names, metavar="A,B,…", help="names of all columns of a CSV file, in order"
    )
    how.add_argument(
        "--types",
        type=_values.types,
        metavar="infer|NAME=TYPE,…",
        help="types of CSV columns, such as infer or age=int64,score=float32 (default: text)",
    )
    how.add_argument(
        "--null-values",
        type=_values.names,
        metavar="TEXT,…",
        help="CSV fields that mean a missing number, besides empty ones",
    )
    how.add_argument(
        "--missing",
        choices=("null", "nan"),
        help="what a missing number means: a bad row (null), or NaN, in columns of floats",
    )
    how.add_argument(
        "--typed-members",
        action="store_true",
        default=None,
        help="read .cls members of tars as numbers and .npy members as arrays, and keep the key of each sample",
    )
    how.add_argument("--encoding", metavar="NAME", help="encoding of text and CSV files (default: utf-8)")

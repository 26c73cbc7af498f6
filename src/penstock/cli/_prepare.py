"""Turn raw data into a dataset: tokenise, decode or copy it, in parallel. Interrupt it and run it again to resume."""

from __future__ import annotations

import argparse
import csv
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from penstock.errors import counted

if TYPE_CHECKING:
    from penstock.preparation import Prepared, Progress
    from penstock.transforms import Transform

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_INTERRUPTED = 130
_SHOWN_CLASSES = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("sources", nargs="+", metavar="SRC", help="files, globs, folders or URLs")
    parser.add_argument("destination", metavar="DEST", help="folder of the dataset")
    _add_transform_arguments(parser)
    _add_reading_arguments(parser)
    parser.add_argument(
        "--workers", type=_workers, default="auto", metavar="N", help="number of processes (default: one per core)"
    )
    parser.add_argument("--engine", choices=("local", "ray"), default="local", help="where tasks run")
    parser.add_argument("--address", metavar="HOST:PORT", help="Ray cluster (default: one on this machine)")
    parser.add_argument(
        "--shard-bytes",
        type=_size,
        default=256 << 20,
        metavar="SIZE",
        help="size of a shard, such as 256MB (the default is 256MiB)",
    )
    parser.add_argument(
        "--shuffle",
        type=_seed,
        default="auto",
        metavar="SEED",
        help="permute all documents by this seed (default: only what would come class by class)",
    )
    parser.add_argument(
        "--no-shuffle", dest="shuffle", action="store_const", const=None, help="keep the order of the sources"
    )
    parser.add_argument(
        "--pack", type=int, action="append", default=[], metavar="LENGTH", help="count packed rows of this length"
    )
    parser.add_argument("--on-error", choices=("raise", "skip"), default="raise", help="stop at a bad row, or skip it")
    parser.add_argument(
        "--max-skipped",
        type=_rows_or_share,
        metavar="N|SHARE",
        help="most rows to skip: a number, or a share such as 0.5 or 50%% (default: 10%%, and ten rows in any case)",
    )
    parser.add_argument(
        "--origins",
        choices=("auto", "manifest", "column"),
        default="auto",
        help="where to keep the file and row of each sample",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a dataset made with different settings")
    parser.add_argument(
        "--remove", action="store_true", help="remove the samples of source files that are no longer given"
    )


def _add_transform_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what becomes of a row (default: keep its columns)")
    what.add_argument("--tokenizer", metavar="PATH", help="tokenizer.json, a folder, tiktoken:NAME, or bytes")
    what.add_argument("--column", metavar="NAME", help="column that holds the text or the images")
    what.add_argument("--append-eos", metavar="TOKEN", help="token to put at the end of each document")
    what.add_argument("--prepend-bos", metavar="TOKEN", help="token to put at the start of each document")
    what.add_argument(
        "--keep", action="append", default=[], metavar="NAME", help="another column to store (repeatable)"
    )
    what.add_argument("--chat-template", metavar="PATH", help="Jinja template for conversations")
    what.add_argument(
        "--special-tokens",
        choices=("text", "count", "refuse", "allow"),
        help="special tokens spelled out in a text: encode them as text (the default), also count them, refuse the "
        "row, or let them control the model",
    )
    what.add_argument(
        "--image-size", type=_image_size, metavar="SIZE", help="pixels, such as 224 or 256x192 (height x width)"
    )
    what.add_argument(
        "--image-mode", choices=("resize", "crop", "keep"), help="how to bring images to size (default: resize)"
    )
    what.add_argument("--image-store", choices=("pixels", "jpeg", "as_is"), help="what to store (default: pixels)")
    what.add_argument("--function", metavar="MODULE:NAME", help="a Python function of a batch")


def _add_reading_arguments(parser: argparse.ArgumentParser) -> None:
    how = parser.add_argument_group("how to read the sources")
    how.add_argument("--format", metavar="NAME", help="parquet, jsonl, csv, text, images, webdataset, arrow")
    how.add_argument("--text-unit", choices=("file", "line", "separator"), help="what is one document of a text file")
    how.add_argument("--separator", metavar="TEXT", help="text between two documents of a text file")
    how.add_argument(
        "--delimiter", type=_delimiter, metavar="CHARACTER", help="character between two fields of a CSV file"
    )
    how.add_argument(
        "--classes",
        metavar="FILE|DATASET",
        help="names of image classes in the order of their labels: a file with one on each line, or another dataset",
    )
    how.add_argument(
        "--header",
        action=argparse.BooleanOptionalAction,
        help="whether the first line of a CSV file names its columns; needed where that is in doubt",
    )
    how.add_argument("--names", type=_names, metavar="A,B,…", help="names of all columns of a CSV file, in order")
    how.add_argument(
        "--types",
        type=_types,
        metavar="infer|NAME=TYPE,…",
        help="types of CSV columns, such as infer or age=int64,score=float32 (default: text)",
    )
    how.add_argument(
        "--null-values", type=_names, metavar="TEXT,…", help="CSV fields that mean a missing number, beside empty ones"
    )
    how.add_argument("--missing", choices=("null", "nan"), help="what a missing number is: a bad row (null), or NaN")
    how.add_argument("--encoding", metavar="NAME", help="encoding of text and CSV files (default: utf-8)")


def run(arguments: argparse.Namespace) -> int:
    """Return 0 when the dataset is ready, 2 on wrong usage, 130 when interrupted."""
    problem = _wrong_usage(arguments)
    if problem:
        sys.stderr.write(f"penstock prepare: {problem}\n")
        return 2
    from penstock import preparation

    with _progress(as_json=arguments.json) as on_progress:
        try:
            prepared = preparation.prepare(
                arguments.sources,
                arguments.destination,
                transform=_transform(arguments),
                reading=_reading(arguments),
                classes=arguments.classes,
                workers=arguments.workers,
                engine=arguments.engine,
                address=arguments.address,
                shard_bytes=arguments.shard_bytes,
                shuffle=arguments.shuffle,
                pack=arguments.pack,
                on_error=arguments.on_error,
                max_skipped=arguments.max_skipped,
                overwrite=arguments.overwrite,
                remove=arguments.remove,
                origins=arguments.origins,
                on_progress=on_progress,
            )
        except KeyboardInterrupt:
            sys.stderr.write(f"penstock: interrupted. {_what_is_kept(arguments.destination)}\n")
            return _INTERRUPTED
    show_prepared(prepared, as_json=arguments.json)
    return 0


def _what_is_kept(destination: str) -> str:
    from penstock.preparation import find_unfinished

    unfinished = find_unfinished(destination)
    if unfinished is None or not unfinished.tasks:
        return "No task was finished, so nothing is kept; the same command starts again."
    done = f"{unfinished.tasks:,} of {counted(unfinished.total_tasks, 'task')}"
    return f"{done} finished and kept; run the same command to continue."


def _wrong_usage(arguments: argparse.Namespace) -> str | None:
    transforms = ("tokenizer", "image_size", "image_mode", "image_store", "function")
    kinds = {name.split("_")[0]: _flag(name) for name in transforms if getattr(arguments, name)}
    if len(kinds) > 1:
        return f"{' and '.join(kinds.values())} are {len(kinds)} transforms; give only one."
    needs_tokenizer = ("append_eos", "prepend_bos", "chat_template", "special_tokens")
    given = [_flag(name) for name in needs_tokenizer if getattr(arguments, name)]
    if given and not arguments.tokenizer:
        return f"{', '.join(given)} {'need' if len(given) > 1 else 'needs'} --tokenizer."
    if arguments.column and not kinds.keys() & {"tokenizer", "image"}:
        return "--column needs --tokenizer or --image-size. To keep a column, use --keep."
    if arguments.function and arguments.keep:
        return "--keep does not go with --function: the function returns the columns to keep."
    if arguments.image_mode in ("resize", "crop") and not arguments.image_size:
        return f"--image-mode {arguments.image_mode} needs --image-size."
    if arguments.image_size and (arguments.image_mode == "keep" or arguments.image_store == "as_is"):
        return "--image-size changes images, which --image-mode keep and --image-store as_is leave as they are."
    if arguments.max_skipped is not None and arguments.on_error != "skip":
        return "--max-skipped needs --on-error skip."
    if arguments.address and arguments.engine != "ray":
        return "--address needs --engine ray."
    if arguments.origins == "manifest" and type(arguments.shuffle) is int:
        return "--shuffle moves every sample, so their origins must be a column; leave --origins out."
    if (arguments.text_unit == "separator") != bool(arguments.separator):
        return "--text-unit separator and --separator go together."
    return None


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _transform(arguments: argparse.Namespace) -> Transform | None:
    from penstock import transforms

    if arguments.tokenizer:
        return transforms.Tokenize(
            arguments.tokenizer,
            arguments.column or "",
            append_eos=arguments.append_eos,
            prepend_bos=arguments.prepend_bos,
            keep=arguments.keep,
            chat_template=arguments.chat_template,
            special_tokens=arguments.special_tokens or "text",
        )
    if arguments.image_size or arguments.image_mode or arguments.image_store:
        size, mode, store = arguments.image_size, arguments.image_mode, arguments.image_store
        return transforms.DecodeImage(
            size=size,
            mode=mode or ("resize" if size else "keep"),
            store=store or "pixels",
            column=arguments.column or "image",
            keep=arguments.keep or None,
        )
    if arguments.function:
        sys.path.insert(0, os.getcwd())  # as for `python -m`: the function is often in a file that is right here
        return transforms.FunctionTransform(arguments.function)
    return transforms.KeepColumns(arguments.keep) if arguments.keep else None


def _reading(arguments: argparse.Namespace) -> Any:
    from penstock.sources import SourceOptions

    names = ("format", "text_unit", "separator", "delimiter", "header", "names", "types", "missing", "encoding")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if arguments.null_values is not None:
        given["null_values"] = ("", *arguments.null_values)
    return SourceOptions(**given)


@contextmanager
def _progress(*, as_json: bool) -> Iterator[Callable[[Progress], None]]:
    from penstock import report

    if as_json:
        yield lambda progress: report.print_json({"progress": progress.to_json()})
        return
    with preparation_bar() as show:
        yield show


@contextmanager
def preparation_bar() -> Iterator[Callable[[Progress], None]]:
    """A progress bar with the rates of documents, bytes and tokens, the time left, and workers that died."""
    if not sys.stderr.isatty():  # a bar that is disabled still prints an empty line, in rich 13
        yield lambda progress: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    from penstock.report import format_bytes

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[size]}"),
        TextColumn("{task.fields[rates]}"),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Bar(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        line = bar.add_task("look at the sources", total=None, size="", rates="")

        def show(progress: Progress) -> None:
            bar.update(
                line,
                description=progress.stage,
                completed=progress.raw_bytes,
                total=progress.total_bytes,
                size=f"{format_bytes(progress.raw_bytes)} of {format_bytes(progress.total_bytes)}",
                rates=_rates(progress),
            )

        yield show


def _rates(progress: Progress) -> str:
    from penstock.report import format_bytes

    parts = [f"{progress.documents_per_second:,.0f} documents/s", f"{format_bytes(progress.bytes_per_second)}/s"]
    if progress.tokens:
        parts.append(f"{progress.tokens_per_second / 1e6:.1f} Mtok/s")
    parts += [f"{progress.skipped:,} skipped"] if progress.skipped else []
    parts += [f"{worker} died {counted(count, 'time')}" for worker, count in progress.failures.items()]
    return ", ".join(parts)


def show_prepared(prepared: Prepared, *, as_json: bool) -> None:
    """Print the summary of a preparation."""
    from penstock import report

    if as_json:
        report.print_json(prepared.to_json())
        return
    out = report.console()
    for line in _lines(prepared):
        out.print(line)


def _lines(prepared: Prepared) -> Iterator[str]:
    from penstock.report import format_bytes

    tokens = f", {counted(prepared.num_tokens, 'token')}" if prepared.num_tokens else ""
    yield (
        f"{prepared.path}: {counted(prepared.num_samples, 'sample')}{tokens} "
        f"in {counted(prepared.num_shards, 'shard')}, {format_bytes(prepared.num_bytes)}, "
        f"from {counted(prepared.num_files, 'file')}."
    )
    if prepared.classes:
        yield f"  classes: {_name_classes(prepared.classes)}"
    for reason, count in prepared.skipped.items():
        yield f"  skipped {counted(count, 'row')}: {reason}"
    for what, count in prepared.noticed.items():
        yield f"  noticed {what.replace('_', ' ')}: {count:,}"
    if prepared.tasks_run:
        yield from _times(prepared)
    for worker, count in prepared.failures.items():
        yield f"  {worker} died {counted(count, 'time')}; its tasks were done again"
    yield from (f"  {note}" for note in prepared.notes)


def _name_classes(classes: Sequence[str]) -> str:
    shown = [f"{label} {name}" for label, name in enumerate(classes)]
    return ", ".join(shown if len(shown) <= _SHOWN_CLASSES else [*shown[: _SHOWN_CLASSES - 2], "…", shown[-1]])


def _times(prepared: Prepared) -> Iterator[str]:
    from penstock.report import format_bytes

    seconds, busy = prepared.seconds, sum(prepared.worker_seconds.values())
    rate = format_bytes(prepared.raw_bytes / max(1e-9, seconds["work"]))
    kept = f", {prepared.tasks_kept:,} kept" if prepared.tasks_kept else ""
    start_up = f"start-up {seconds['start_up']:.1f} s"
    yield f"  {counted(prepared.tasks_run, 'task')} in {seconds['work']:.1f} s{kept}: {rate}/s; {start_up}"
    shares = ", ".join(
        f"{name} {100 * spent / max(1e-9, busy):.0f} %" for name, spent in prepared.worker_seconds.items()
    )
    yield f"  workers: {shares}; at most {format_bytes(prepared.peak_worker_bytes)} of memory each"


def _seed(text: str) -> int | str:
    return text if text == "auto" else int(text)


def _workers(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processes, or 'auto'")
    return int(text)


def _rows_or_share(text: str) -> int | float:
    try:
        if text.endswith("%"):
            return float(text[:-1]) / 100
        return int(text) if text.isdigit() else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of rows, or a share such as 0.5 or 50%") from None


def _names(text: str) -> tuple[str, ...]:
    return tuple(next(csv.reader([text]), ()))


def _types(text: str) -> dict[str, str] | str:
    if text == "infer":
        return text
    pairs = [each.rpartition("=") for each in _names(text)]
    if not all(name and kind for name, _, kind in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not 'infer' or such as age=int64,score=float32")
    return {name: kind for name, _, kind in pairs}


def _delimiter(text: str) -> str:
    return "\t" if text in ("\\t", "tab") else text


def _image_size(text: str) -> int | tuple[int, int]:
    match = re.fullmatch(r"([1-9][0-9]*)(?:x([1-9][0-9]*))?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size in pixels, such as 224 or 256x192")
    return (int(match[1]), int(match[2])) if match[2] else int(match[1])


def _size(text: str) -> int:
    match = re.fullmatch(r"([0-9]+)\s*([A-Za-z]*)", text)
    if match is None or match[2].upper() not in _UNITS or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size, such as 256MB")
    return int(match[1]) * _UNITS[match[2].upper()]

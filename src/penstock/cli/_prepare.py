"""`penstock prepare`: flags for the settings of a preparation, its progress, and what was made."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from penstock.cli import _values
from penstock.cli._flags import Flags, flag_of, given
from penstock.errors import counted

if TYPE_CHECKING:
    from penstock.preparation import Prepared, Progress
    from penstock.sources import SourceOptions
    from penstock.transforms import Transform

_INTERRUPTED = 130
_CHAT = ("chat_format", "chat_template")
_CHAT_DETAILS = ("tools_column", "template_date", "template_values", "loss_on", "processor")


def add_prepare_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes: every flag has the name of the library's setting."""
    from penstock import preparation, sources

    parser.add_argument("sources", nargs="+", metavar="SRC", help="files, globs, folders or URLs")
    parser.add_argument(
        "destination", metavar="DEST", help="folder of the dataset, or a URL, such as s3://bucket/corpus"
    )
    _add_transforms(parser)
    prepare = preparation.prepare

    reading = parser.add_argument_group("how to read the sources")
    how = Flags(reading, sources.SourceOptions)
    how.add("format", "text_unit", "encoding")
    how.add("separator", metavar="TEXT")
    how.add("delimiter", type=_values.delimiter, metavar="CHARACTER")
    how.add("header", "names")
    how.add("types", type=_values.types, metavar="infer|NAME=TYPE,…")
    how.add("null_values", metavar="TEXT,…")
    how.add("missing", "typed_members")
    Flags(reading, prepare).add("classes", type=str, metavar="FILE|DATASET")

    written = parser.add_argument_group("what is written")
    what = Flags(written, prepare)
    what.add("shuffle", type=_values.seed, metavar="SEED")
    written.add_argument(
        "--no-shuffle",
        dest="shuffle",
        action="store_const",
        const=None,
        default=argparse.SUPPRESS,
        help="keep the order of the sources",
    )
    what.add("pack", action="append", metavar="LENGTH")
    what.add("split", type=_values.shares, metavar="NAME=SHARE,…")
    what.add("split_seed", metavar="SEED")
    what.add("split_by", type=_values.word_or_names, metavar="content|file|NAME,…")
    what.add("limit", type=_values.count)
    what.add("shard_bytes", "origins")

    again = parser.add_argument_group("if DEST exists (default: continue, or add what is new)")
    Flags(again, prepare).add("overwrite", "append", "remove")
    run = Flags(parser.add_argument_group("how it runs"), prepare)
    run.add("workers", type=_values.workers)
    run.add("on_error", "engine")
    run.add("max_skipped", type=_values.rows_or_share, metavar="N|SHARE")
    run.add("address", metavar="HOST:PORT")


def _add_transforms(parser: argparse.ArgumentParser) -> None:
    from penstock import transforms

    group = parser.add_argument_group("how rows become samples (default: keep their columns)")
    tokens = Flags(group, transforms.Tokenize)
    tokens.add("tokenizer", metavar="PATH", help="tokenizer.json, a folder, tiktoken:NAME, or bytes")
    tokens.add("column")
    tokens.add("append_eos", "prepend_bos", metavar="TOKEN")
    tokens.add("keep", type=str, action="append", help="another column to store (repeatable)")
    tokens.add("special_tokens")
    images = Flags(group, transforms.DecodeImage, prefix="image_")
    images.add("size", type=_values.image_size, metavar="SIZE")
    images.add("mode", "store")
    kinds, told = ("video", "audio"), "store films or sounds as they are, with what clips of them need to be read"
    group.add_argument("--index", choices=kinds, default=argparse.SUPPRESS, help=told)
    Flags(group, transforms.FunctionTransform).add(
        "function", metavar="MODULE:NAME", help="a Python function of a batch"
    )

    chat = Flags(parser.add_argument_group("conversations, with --tokenizer"), transforms.Tokenize)
    chat.add("chat_format", "tools_column")
    template = "a Jinja template, or the tokenizer's own, which messages and sharegpt use by default"
    chat.add("chat_template", type=str, metavar="PATH|own", help=template)
    chat.add("template_date", metavar="YYYY-MM-DD")
    values = 'more variables for the template, as in {"enable_thinking": false}'
    chat.add("template_values", type=_values.json_object, metavar="JSON", help=values)
    turns = "store a loss mask of all of the assistant's turns (the default), of the last, or none"
    chat.add("loss_on", choices=("assistant", "last", "none"), help=turns)
    chat.add("processor", metavar="FOLDER", help="conversations may hold pictures, which this processor is made for")
    chat.add("media_root", metavar="FOLDER|URL")
    chat.add("images_column", metavar="NAME")


def run_prepare(arguments: argparse.Namespace) -> int:
    """Turn raw data into a dataset: tokenize, decode or copy it, in parallel. Interrupt it and run it again to resume.

    Exit code: 0 if the dataset is ready, 1 if not, 2 for wrong usage, 130 if interrupted.
    """
    problem = _wrong_usage(vars(arguments))
    if problem:
        sys.stderr.write(f"penstock prepare: {problem}\n")
        return 2
    from penstock.preparation import prepare

    with show_progress(as_json=arguments.json) as on_progress:
        try:
            prepared = prepare(
                **given(arguments, prepare),
                transform=_transform_of(arguments),
                reading=_reading_of(arguments),
                on_progress=on_progress,
            )
        except KeyboardInterrupt:
            sys.stderr.write(f"penstock: interrupted. {_what_is_kept(arguments)}\n")
            return _INTERRUPTED
    _show(prepared, as_json=arguments.json)
    return 0


def _what_is_kept(arguments: argparse.Namespace) -> str:
    from penstock.preparation import find_unfinished

    parts = ("train", *vars(arguments).get("split", ()))
    found = [find_unfinished(os.path.join(arguments.destination, name)) for name in ("", *parts)]
    unfinished = max(filter(None, found), key=lambda each: each.tasks, default=None)
    if unfinished is None or not unfinished.tasks:
        return "No task was finished, so nothing is kept; the same command starts over."
    done = f"{unfinished.tasks:,} of {counted(unfinished.total_tasks, 'task')}"
    return f"{done} finished and kept; run the same command to continue."


def _wrong_usage(typed: Mapping[str, Any]) -> str | None:
    """Why the flags do not go together; None if they do."""
    transforms = ("tokenizer", "image_size", "image_mode", "image_store", "index", "function")
    kinds = {name.split("_")[0]: flag_of(name) for name in transforms if typed.get(name)}
    if len(kinds) > 1:
        return f"{' and '.join(kinds.values())} are {len(kinds)} transforms; give only one."
    needs_tokenizer = ("append_eos", "prepend_bos", "special_tokens", *_CHAT, *_CHAT_DETAILS)
    without = [flag_of(name) for name in needs_tokenizer if typed.get(name)]
    if without and "tokenizer" not in kinds:
        return f"{', '.join(without)} {'need' if len(without) > 1 else 'needs'} --tokenizer."
    needs_chat = [flag_of(name) for name in _CHAT_DETAILS if typed.get(name)]
    if needs_chat and not any(typed.get(name) for name in _CHAT):
        return f"{needs_chat[0]} needs --chat-format or --chat-template."
    if (typed.get("media_root") or typed.get("images_column")) and not typed.get("processor"):
        return "--media-root and --images-column need --processor."
    if typed.get("column") and not kinds.keys() & {"tokenizer", "image", "index"}:
        return "--column needs --tokenizer, --image-size or --index. To keep a column, use --keep."
    if typed.get("function") and typed.get("keep"):
        return "--keep does not go with --function: the function returns the columns to keep."
    if typed.get("image_mode") in ("resize", "crop") and not typed.get("image_size"):
        return f"--image-mode {typed['image_mode']} needs --image-size."
    if typed.get("image_size") and (typed.get("image_mode") == "keep" or typed.get("image_store") == "as_is"):
        return "--image-size changes images, which --image-mode keep and --image-store as_is leave as they are."
    if typed.get("max_skipped") is not None and typed.get("on_error") != "skip":
        return "--max-skipped needs --on-error skip."
    if typed.get("append") and (typed.get("overwrite") or typed.get("remove")):
        return "--append keeps every existing sample; it does not go with --overwrite or --remove."
    if typed.get("address") and typed.get("engine") != "ray":
        return "--address needs --engine ray."
    if typed.get("origins") == "manifest" and type(typed.get("shuffle")) is int:
        return "--shuffle moves every sample, so their origins must be a column; leave --origins out."
    if not typed.get("split") and (typed.get("split_seed") or typed.get("split_by", "content") != "content"):
        return f"{'--split-seed' if typed.get('split_seed') else '--split-by'} needs --split."
    if (typed.get("text_unit") == "separator") != bool(typed.get("separator")):
        return "--text-unit separator and --separator go together."
    return None


def _transform_of(arguments: argparse.Namespace) -> Transform | None:
    """The transform that the flags describe."""
    from penstock import transforms

    typed = vars(arguments)
    if typed.get("tokenizer"):
        options = given(arguments, transforms.Tokenize, without="engine")
        if options.get("chat_template") == "own":
            options["chat_template"] = True
        if options.get("loss_on") == "none":
            options |= {"loss_mask": False, "loss_on": "assistant"}
        return transforms.Tokenize(**options)
    images: dict[str, Any] = {
        name.removeprefix("image_"): value for name, value in typed.items() if name.startswith("image_")
    }
    if images:
        mode = "resize" if "size" in images else "keep"
        return transforms.DecodeImage(**{"mode": mode} | images | given(arguments, transforms.DecodeImage))
    if kind := typed.get("index"):
        index = transforms.IndexVideo if kind == "video" else transforms.IndexAudio
        return index(**given(arguments, index))
    if typed.get("function"):
        sys.path.insert(0, os.getcwd())  # like `python -m`: the function is often in a file in this folder
        return transforms.FunctionTransform(typed["function"])
    return transforms.KeepColumns(typed["keep"]) if typed.get("keep") else None


def _reading_of(arguments: argparse.Namespace) -> SourceOptions:
    """How to read the sources."""
    from penstock.sources import SourceOptions

    options = given(arguments, SourceOptions, without="classes")
    if "null_values" in options:
        options["null_values"] = ("", *options["null_values"])
    return SourceOptions(**options)


@contextmanager
def show_progress(*, as_json: bool) -> Iterator[Callable[[Progress], None]]:
    """Lines of JSON for programs; for people a bar with the rates of documents, bytes and tokens, and the time left."""
    from penstock import report

    if as_json:
        yield lambda progress: report.print_json({"progress": progress.to_json()})
        return
    if not sys.stderr.isatty():  # in rich 13, even a disabled bar prints an empty line
        yield lambda progress: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[size]}"),
        TextColumn("{task.fields[rates]}"),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Bar(*columns, console=Console(stderr=True)) as bar:
        line = bar.add_task("listing the sources", total=None, size="", rates="")

        def show(progress: Progress) -> None:
            bar.update(
                line,
                description=progress.stage,
                completed=progress.raw_bytes,
                total=progress.total_bytes,
                size=f"{report.format_bytes(progress.raw_bytes)} of {report.format_bytes(progress.total_bytes)}",
                rates=_rates(progress),
            )

        yield show


def _rates(progress: Progress) -> str:
    """Also how many rows were skipped, and which workers died."""
    from penstock.report import format_bytes

    parts = [f"{progress.documents_per_second:,.0f} documents/s", f"{format_bytes(progress.bytes_per_second)}/s"]
    if progress.tokens:
        parts.append(f"{progress.tokens_per_second / 1e6:.1f} Mtok/s")
    parts += [f"{progress.skipped:,} skipped"] if progress.skipped else []
    parts += [f"{worker} died {counted(count, 'time')}" for worker, count in progress.failures.items()]
    return ", ".join(parts)


def _show(prepared: Prepared, *, as_json: bool) -> None:
    from penstock import report

    if as_json:
        report.print_json(prepared.to_json())
        return
    report.console().print(str(prepared))

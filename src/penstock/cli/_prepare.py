"""Turn raw data into a dataset: tokenize, decode or copy it, in parallel. Interrupt it and run it again to resume."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli._prepare_arguments import add_arguments
from penstock.errors import counted

if TYPE_CHECKING:
    from penstock.preparation import Prepared, Progress
    from penstock.sources import SourceOptions
    from penstock.transforms import Transform

__all__ = ["add_arguments", "run"]

_INTERRUPTED = 130
_CHAT = ("chat_format", "chat_template")
_CHAT_DETAILS = ("tools_column", "template_date", "template_values", "loss_on")


def run(arguments: argparse.Namespace) -> int:
    """0 if the dataset is ready, 2 for wrong usage, 130 if interrupted."""
    problem = _wrong_usage(arguments)
    if problem:
        sys.stderr.write(f"penstock prepare: {problem}\n")
        return 2
    from penstock import preparation

    with show_progress(as_json=arguments.json) as on_progress:
        try:
            prepared = preparation.prepare(
                arguments.sources,
                arguments.destination,
                transform=_transform_of(arguments),
                reading=_reading_of(arguments),
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
                append=arguments.append,
                remove=arguments.remove,
                split=arguments.split,
                split_seed=arguments.split_seed,
                split_by=_split_by_of(arguments),
                limit=arguments.limit,
                origins=arguments.origins,
                on_progress=on_progress,
            )
        except KeyboardInterrupt:
            sys.stderr.write(f"penstock: interrupted. {_what_is_kept(arguments)}\n")
            return _INTERRUPTED
    show_prepared(prepared, as_json=arguments.json)
    return 0


def _what_is_kept(arguments: argparse.Namespace) -> str:
    from penstock.preparation import find_unfinished

    parts = ("train", *arguments.split) if arguments.split else ()
    found = [find_unfinished(Path(arguments.destination, name)) for name in ("", *parts)]
    unfinished = max(filter(None, found), key=lambda each: each.tasks, default=None)
    if unfinished is None or not unfinished.tasks:
        return "No task was finished, so nothing is kept; the same command starts over."
    done = f"{unfinished.tasks:,} of {counted(unfinished.total_tasks, 'task')}"
    return f"{done} finished and kept; run the same command to continue."


def _wrong_usage(arguments: argparse.Namespace) -> str | None:
    """Why the flags do not go together; None if they do."""
    transforms = ("tokenizer", "image_size", "image_mode", "image_store", "function")
    kinds = {name.split("_")[0]: _flag(name) for name in transforms if getattr(arguments, name)}
    if len(kinds) > 1:
        return f"{' and '.join(kinds.values())} are {len(kinds)} transforms; give only one."
    needs_tokenizer = ("append_eos", "prepend_bos", "special_tokens", *_CHAT, *_CHAT_DETAILS)
    given = [_flag(name) for name in needs_tokenizer if getattr(arguments, name)]
    if given and not arguments.tokenizer:
        return f"{', '.join(given)} {'need' if len(given) > 1 else 'needs'} --tokenizer."
    needs_chat = [_flag(name) for name in _CHAT_DETAILS if getattr(arguments, name)]
    if needs_chat and not (arguments.chat_format or arguments.chat_template):
        return f"{needs_chat[0]} needs --chat-format or --chat-template."
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
    if arguments.append and (arguments.overwrite or arguments.remove):
        return "--append keeps every existing sample; it does not go with --overwrite or --remove."
    if arguments.address and arguments.engine != "ray":
        return "--address needs --engine ray."
    if arguments.origins == "manifest" and type(arguments.shuffle) is int:
        return "--shuffle moves every sample, so their origins must be a column; leave --origins out."
    if not arguments.split and (arguments.split_seed or arguments.split_by != ("content",)):
        return f"{'--split-seed' if arguments.split_seed else '--split-by'} needs --split."
    if (arguments.text_unit == "separator") != bool(arguments.separator):
        return "--text-unit separator and --separator go together."
    return None


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _transform_of(arguments: argparse.Namespace) -> Transform | None:
    """The transform that the flags describe."""
    from penstock import transforms

    if arguments.tokenizer:
        return transforms.Tokenize(
            arguments.tokenizer,
            arguments.column or "",
            append_eos=arguments.append_eos,
            prepend_bos=arguments.prepend_bos,
            keep=arguments.keep,
            chat_template=True if arguments.chat_template == "own" else arguments.chat_template,
            chat_format=arguments.chat_format,
            tools_column=arguments.tools_column,
            template_date=arguments.template_date,
            template_values=arguments.template_values or {},
            loss_mask=arguments.loss_on != "none",
            loss_on="last" if arguments.loss_on == "last" else "assistant",
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
        sys.path.insert(0, os.getcwd())  # like `python -m`: the function is often in a file in this folder
        return transforms.FunctionTransform(arguments.function)
    return transforms.KeepColumns(arguments.keep) if arguments.keep else None


def _reading_of(arguments: argparse.Namespace) -> SourceOptions:
    """How to read the sources."""
    from penstock.sources import SourceOptions

    names = (
        "format",
        "text_unit",
        "separator",
        "delimiter",
        "header",
        "names",
        "types",
        "missing",
        "encoding",
        "typed_members",
    )
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if arguments.null_values is not None:
        given["null_values"] = ("", *arguments.null_values)
    return SourceOptions(**given)


def _split_by_of(arguments: argparse.Namespace) -> str | tuple[str, ...]:
    """What decides a sample's part: a word, or columns."""
    names: tuple[str, ...] = arguments.split_by
    return names[0] if len(names) == 1 else names


@contextmanager
def show_progress(*, as_json: bool) -> Iterator[Callable[[Progress], None]]:
    """A bar for people, lines of JSON for programs."""
    from penstock import report

    if as_json:
        yield lambda progress: report.print_json({"progress": progress.to_json()})
        return
    with preparation_bar() as show:
        yield show


@contextmanager
def preparation_bar() -> Iterator[Callable[[Progress], None]]:
    """A progress bar with the rates of documents, bytes and tokens, the time left, and workers that died."""
    if not sys.stderr.isatty():  # in rich 13, even a disabled bar prints an empty line
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
        line = bar.add_task("listing the sources", total=None, size="", rates="")

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
    report.console().print(str(prepared))

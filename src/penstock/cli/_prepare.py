"""Turn raw data into a dataset: tokenise, decode or copy it, in parallel. Interrupt it and run it again to resume."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from penstock.cli._prepare_arguments import add_arguments
from penstock.cli._prepare_flags import reading_of, split_by_of, transform_of, wrong_usage
from penstock.cli._prepare_output import show_prepared, show_progress
from penstock.errors import counted

__all__ = ["add_arguments", "run"]

_INTERRUPTED = 130


def run(arguments: argparse.Namespace) -> int:
    """0 if the dataset is ready, 2 for wrong usage, 130 if interrupted."""
    problem = wrong_usage(arguments)
    if problem:
        sys.stderr.write(f"penstock prepare: {problem}\n")
        return 2
    from penstock import preparation

    with show_progress(as_json=arguments.json) as on_progress:
        try:
            prepared = preparation.prepare(
                arguments.sources,
                arguments.destination,
                transform=transform_of(arguments),
                reading=reading_of(arguments),
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
                split_by=split_by_of(arguments),
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

"""`penstock verify`, `stage` and `push`: a dataset checked, and copied to this node's own storage or to a store."""

import argparse

from penstock.cli._flags import Flags, given
from penstock.errors import counted
from penstock.report import console, format_bytes, print_json, progress_bar


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    parser.add_argument("path", metavar="DATASET", help="the dataset's folder")


def run_verify(arguments: argparse.Namespace) -> int:
    """Check every byte of a dataset against its checksums and list what is damaged.

    Exit code: 0 if the dataset is intact, 1 if anything is wrong.
    """
    from penstock.shards import verify

    with progress_bar("verify") as on_progress:
        result = verify(arguments.path, on_progress=on_progress)
    if arguments.json:
        print_json(result.to_json())
    elif result.is_sound:
        size = format_bytes(result.num_bytes)
        console().print(
            f"{result.path}: sound. {counted(result.num_samples, 'sample')} in {counted(result.num_shards, 'shard')}, "
            f"{size}."
        )
    else:
        for fault in result.faults:
            console().print(fault)
        console().print(f"{result.path}: {counted(len(result.faults), 'fault')}.")
    return 0 if result.is_sound else 1


def add_stage_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    parser.add_argument("source", metavar="SRC", help="the dataset's folder, or its URL, such as s3://bucket/corpus")
    parser.add_argument("destination", metavar="DST", help="a folder on this node, such as $SCRATCH")


def run_stage(arguments: argparse.Namespace) -> int:
    """Copy a dataset to this node's own storage, unless it is already there, and verify the copy.

    Run it on every rank, or once per node: one process copies, the others wait for it. If interrupted, it continues
    where it stopped; the dataset appears only once it is complete and every checksum is right.
    """
    from penstock.dataset import stage

    with progress_bar("stage") as on_progress:
        staged = stage(arguments.source, arguments.destination, on_progress=on_progress)
    if arguments.json:
        print_json(staged.to_json())
    else:
        console().print(str(staged))
    return 0


def add_push_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    from penstock.dataset import push

    parser.add_argument("source", metavar="SRC", help="the dataset's folder")
    parser.add_argument("url", metavar="URL", help="where it will be opened, such as s3://bucket/corpus")
    Flags(parser, push).add("overwrite", "prune")


def run_push(arguments: argparse.Namespace) -> int:
    """Copy a dataset to an object store (s3://, gs://, az://, or another that fsspec knows), verified.

    Whoever opens the URL sees the old dataset until the last moment, and then all of the new one. If interrupted, it
    continues where it stopped; a rerun sends only what has changed.
    """
    from penstock.dataset import push

    with progress_bar("push") as on_progress:
        pushed = push(**given(arguments, push), on_progress=on_progress)
    if arguments.json:
        print_json(pushed.to_json())
    else:
        console().print(str(pushed))
    return 0

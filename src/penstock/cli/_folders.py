"""`penstock verify`, `stage`, `push`, `cache`: datasets checked, copied to this node or to a store, and kept here."""

import argparse

from penstock.cli._flags import Flags, given
from penstock.errors import counted
from penstock.report import console, format_bytes, print_json, progress_bar


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    parser.add_argument("path", metavar="DATASET", help="the dataset's folder, or its URL")


def run_verify(arguments: argparse.Namespace) -> int:
    """Check every byte of a dataset against its checksums and list what is damaged.

    Exit code: 0 if the dataset is intact, 1 if anything is wrong.
    """
    from penstock.dataset import verify

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


def add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    parser.add_argument("--cache", metavar="FOLDER", help="the cache's folder (default: as penstock.open chooses it)")
    parser.add_argument(
        "--clear", nargs="?", const="", metavar="URL", help="remove what is kept of this dataset; without URL, of all"
    )


def run_cache(arguments: argparse.Namespace) -> int:
    """Show which remote datasets this node keeps, or remove them.

    Files that a process has open are removed when it closes them. Nothing else in the folder is touched, and what is
    removed is fetched again when it is needed.
    """
    from penstock.dataset import default_cache
    from penstock.filesystem import local_path
    from penstock.remote import Cache

    root = local_path(arguments.cache, "a cache").absolute() if arguments.cache else default_cache()
    cache = Cache(root)
    freed = None if arguments.clear is None else cache.clear(arguments.clear.rstrip("/") or None)
    found = cache.datasets()
    if arguments.json:
        shown = [{"url": each.url, "path": str(each.path), "bytes": each.num_bytes} for each in found]
        print_json({"path": str(root), "freed_bytes": freed or 0, "datasets": shown})
        return 0
    out = console()
    if freed is not None:
        out.print(f"{format_bytes(freed)} freed.", highlight=False)
    out.print(f"{root}: {format_bytes(sum(each.num_bytes for each in found))}", highlight=False, soft_wrap=True)
    for each in found:
        files = counted(each.num_files, "file")
        out.print(f"  {each.url}  {format_bytes(each.num_bytes)} in {files}", highlight=False, soft_wrap=True)
    return 0

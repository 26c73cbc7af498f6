"""`penstock inspect`: what it gathered, or a batch of a plan, cut to fit on a screen unless `--full`.

Attributes of a manifest are JSON that anybody may have written, so a value may have any type: one that `prepare` would
not write is shown as it is.
"""

import argparse
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from penstock.cli._description import Description, describe, with_texts
from penstock.errors import counted, printable
from penstock.preparation import part_of_recipe
from penstock.report import console, format_bytes, print_json, progress_bar
from penstock.schema import Column
from penstock.shards import Storage

_WIDTH, _SHOWN_LINES = 160, 24
_SHOWN_COLUMNS, _SHOWN_ATTRIBUTES, _SHOWN_BINS = 8, 8, 10
_SHOWN_ATTRIBUTE = 200
_SHOWN_OF_TRANSFORM = ("column", "function", "size", "mode", "store", "keep")
_HASH = re.compile("[0-9a-f]{32,}")
Thing = TypeVar("Thing")


def add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    parser.add_argument(
        "path",
        metavar="DATASET|PLAN.toml",
        help="the dataset's folder or URL, tars or Arrow files (a pattern in quotes), or a plan file (.toml)",
    )
    parser.add_argument("--samples", type=int, metavar="N", help="how many samples to show (default: 1; as JSON 3)")
    parser.add_argument("--full", action="store_true", help="show everything, not just what fits on a screen")
    parser.add_argument(
        "--decode",
        metavar="TOKENIZER",
        help="show tokens as text, with this tokenizer.json or folder (a note says if it is a different one)",
    )
    parser.add_argument("--step", type=int, default=0, metavar="N", help="which batch of a plan to show (default: 0)")
    parser.add_argument(
        "--sources",
        action="store_true",
        help="also check whether the source files have changed, wherever the dataset says they are: only for datasets "
        "you trust",
    )


def run_inspect(arguments: argparse.Namespace) -> int:
    """Show what is in a dataset: columns, counts, sizes, attributes, lengths, and a few samples.

    Of a plan file, show a batch.
    """
    from penstock.filesystem import is_url, local_path

    num_samples = arguments.samples
    if num_samples is None:
        num_samples = 3 if arguments.json else 1
    if is_url(arguments.path):
        path: Path | str = arguments.path.rstrip("/")
    else:
        path = local_path(arguments.path, "a dataset")
    if isinstance(path, Path) and path.suffix == ".toml" and path.is_file():
        return _show_batch(arguments)
    with progress_bar("index") as on_progress:
        description = describe(
            path, num_samples=num_samples, looks_at_sources=arguments.sources, on_progress=on_progress
        )
    description = with_texts(description, arguments.decode)
    if arguments.json:
        print_json(description.to_json())
    else:
        print_description(description, is_full=arguments.full)
    return 0


def _show_batch(arguments: argparse.Namespace) -> int:
    """A batch of a plan as text, with document boundaries."""
    from penstock.plan import load_plan
    from penstock.transforms import find_decoder

    plan = load_plan(arguments.path)
    made_with = plan.source.tokenizers if arguments.decode is None else {}
    try:
        text = plan.show(arguments.step, find_decoder(arguments.decode, made_with))
    except IndexError as error:  # there is no such step: a mistake of the user's, not ours
        raise ValueError(str(error)) from None
    if arguments.json:
        print_json({"plan": repr(plan), "fingerprint": plan.fingerprint, "step": arguments.step, "batch": text})
    else:
        shown = text if arguments.full else _on_a_screen(text)
        console().print(f"{plan!r}\n\nstep {arguments.step}: {shown}", markup=False, highlight=False, soft_wrap=True)
    return 0


def _on_a_screen(text: str) -> str:
    """The first lines, each as long as a line of a terminal; what is left out is counted."""
    lines = text.split("\n")
    shown = [line if len(line) <= _WIDTH else f"{line[:_WIDTH]} …" for line in lines[:_SHOWN_LINES]]
    if len(lines) > _SHOWN_LINES:
        shown.append(f"… and {counted(len(lines) - _SHOWN_LINES, 'more line')}; --full shows all")
    elif any(len(line) > _WIDTH for line in lines):
        shown.append("Long lines are cut; --full shows all")
    return "\n".join(shown)


def print_description(description: Description, *, is_full: bool = False) -> None:
    """Print for people; what does not fit on a screen is only counted, unless `is_full`."""
    out = console()
    for line in _lines(description, is_full):
        out.print(
            line,
            style="bold" if line == str(description.path) else None,
            end="" if line == str(description.path) else "\n",
        )


def _lines(description: Description, is_full: bool) -> Iterator[str]:
    """What it is, how much, from where, whether it is current; then columns, facts, lengths, samples."""
    storage = description.storage
    yield str(description.path)
    yield f"   fingerprint {storage.fingerprint}"
    files = counted(description.num_files, "file" if description.is_foreign else "shard")
    yield f"{counted(storage.num_samples, 'sample')} in {files}, {format_bytes(storage.num_bytes)}"
    if description.is_foreign:
        yield "No checksums: damage to the data is not noticed. `penstock prepare` makes a checked copy."
    yield from _currency(description)
    yield ""
    yield from _columns(storage, is_full)
    yield from _facts(storage, is_full)
    yield from _histograms(description, is_full)
    yield from _samples(description, is_full)


def _currency(description: Description) -> Iterator[str]:
    if description.staleness is not None:
        yield f"Sources: {description.staleness}"
    elif description.unfinished is not None:
        yield f"A preparation can be continued: {description.unfinished}"
    elif (sources := _sources_of(description.storage.attributes)) is not None:
        yield f"From {printable(sources)}"
        yield "Sources: not checked; --sources says whether they have changed."


def _columns(storage: Storage, is_full: bool) -> Iterator[str]:
    columns, left = _cut(storage.schema.shown.columns, None if is_full else _SHOWN_COLUMNS)
    for column in columns:
        yield f"  {printable(column.name):<20} {column.spec:<20} {_size(storage, column)}"
    if left:
        yield f"  … and {counted(left, 'more column')}; --full shows all"


def _facts(storage: Storage, is_full: bool) -> Iterator[str]:
    told = {
        key: _in_words(value) if is_full else _in_short(key, storage.attributes)
        for key, value in storage.attributes.items()
    }
    facts, left = _cut([(key, words) for key, words in told.items() if words], None if is_full else _SHOWN_ATTRIBUTES)
    if facts:
        yield ""
    for key, fact in facts:
        words = printable(fact)
        yield f"  {printable(key):<20} {words if is_full else _shorten(words)}"
    if left:
        yield f"  … and {left} more; --full shows all"
    for line in _partly(storage.attributes):
        yield f"  {printable(line)}"
    if _lets_text_control(storage.attributes.get("tokenizer")):
        yield "  Special tokens spelled out in a text are control tokens in this dataset (special_tokens='allow')."


def _histograms(description: Description, is_full: bool) -> Iterator[str]:
    histograms, left = _cut(list(description.histograms.items()), None if is_full else 1)
    for name, lengths in histograms:
        yield f"\nLengths of {printable(name)}: {lengths.shortest:,} to {lengths.longest:,}, mean {lengths.mean:,.1f}"
        yield from lengths.lines(None if is_full else _SHOWN_BINS)
    if left:
        yield f"Lengths of {counted(left, 'more column')}: --full shows all"


def _samples(description: Description, is_full: bool) -> Iterator[str]:
    for index, sample in enumerate(description.samples):
        yield f"\nSample {index}"
        values, left = _cut(list(sample.items()), None if is_full else _SHOWN_COLUMNS)
        for name, preview in values:
            yield f"  {printable(name):<20} {preview}"
        if left:
            yield f"  … and {counted(left, 'more column')}; --full shows all"
    made_with = description.storage.attributes.get("tokenizer")
    if description.samples and not description.is_decoded and isinstance(made_with, Mapping):
        name = printable(_in_words(made_with.get("name")))
        yield f"  --decode TOKENIZER shows tokens as text; the tokenizer was {name}"


def _cut(things: Sequence[Thing], limit: int | None) -> tuple[Sequence[Thing], int]:
    """(the first few, how many are left)."""
    shown = things if limit is None else things[:limit]
    return shown, len(things) - len(shown)


def _partly(attributes: Mapping[str, Any]) -> Iterator[str]:
    """What to know about a dataset that does not hold all samples of its sources."""
    preparation = attributes.get("preparation")
    recipe = preparation.get("recipe") if isinstance(preparation, Mapping) else None
    if not isinstance(recipe, Mapping):
        return
    part, limit = part_of_recipe(recipe), recipe.get("limit")
    if part is not None:
        by = part.by if isinstance(part.by, str) else ", ".join(part.by)
        shares = ", ".join(f"{name} {100 * share:g} %" for name, share in part.parts)
        yield f"Part {part.name!r} of a split by {by} with seed {part.seed}: {shares}."
    if type(limit) is int:
        yield f"A trial: at most the first {counted(limit, 'sample')} of the sources."


def _lets_text_control(tokenizer: Any) -> bool:
    """Whether special tokens in a text are control tokens; datasets made before this option existed do not say so."""
    if not isinstance(tokenizer, Mapping) or tokenizer.get("kind") not in ("json", "tiktoken"):
        return False
    return bool(tokenizer.get("special_tokens", "allow") == "allow")


def _shorten(text: str) -> str:
    if len(text) <= _SHOWN_ATTRIBUTE:
        return text
    return f"{text[:_SHOWN_ATTRIBUTE]} … ({len(text):,} characters; --full shows all)"


def _size(storage: Storage, column: Column) -> str:
    if not column.is_ragged:
        return format_bytes(column.item_bytes * storage.num_samples)
    counts = [storage.num_elements(part) for part in column.stored]
    what = "value" if len(counts) == 1 else "byte string"
    return f"{format_bytes(counts[0] * column.item_bytes)}, {counted(counts[-1], what)}"


def _in_words(value: Any) -> str:
    """JSON on one line for people: empty values are left out, hashes are shortened."""
    if isinstance(value, Mapping):
        present = {key: part for key, part in value.items() if part not in (None, {}, [], "")}
        parts = [
            f"{key} ({_in_words(part)})" if isinstance(part, Mapping) else f"{key} {_in_words(part)}"
            for key, part in present.items()
        ]
        return ", ".join(parts) if parts else "nothing"
    if isinstance(value, list):
        return f"[{', '.join(map(_in_words, value))}]"
    if isinstance(value, str):
        return f"{value[:12]}…" if _HASH.fullmatch(value) else value
    return f"{value:,}" if type(value) is int else str(value)


def _in_short(key: str, attributes: Mapping[str, Any]) -> str | None:
    """An attribute for the screen; None for one that is shown elsewhere, or is for machines."""
    value = attributes[key]
    if key == "preparation" or (key == "images" and "transform" in attributes):
        return None
    tell, needs = _TELLERS.get(key, (_in_words, ()))
    return tell(value) if isinstance(value, Mapping) and all(each in value for each in needs) else _in_words(value)


def _sources_of(attributes: Mapping[str, Any]) -> str | None:
    """From how many files, found by which patterns, a dataset was prepared; None if it does not say."""
    preparation = attributes.get("preparation")
    if not isinstance(preparation, Mapping):
        return None
    files, patterns = preparation.get("files"), preparation.get("patterns")
    if type(files) is not int or not isinstance(patterns, list) or not patterns:
        return "unknown"
    more = f" and {len(patterns) - 1} more" if len(patterns) > 1 else ""
    return f"{counted(files, 'file')}: {_in_words(patterns[0])}{more}"


def _tokenizer(value: Mapping[str, Any]) -> str:
    ends = {"bos": "begins each document", "eos": "ends each document"}
    added = [
        f"{_in_words(value.get(f'{end}_token'))} ({_in_words(value.get(f'{end}_id'))}) {what}"
        for end, what in ends.items()
        if value.get(f"{end}_added") is True
    ]
    words = [_in_words(value["name"]), f"{_in_words(value['vocab_size'])} tokens", *added]
    policy = value.get("special_tokens")
    return ", ".join(
        [*words, f"special tokens in texts: {policy}"] if policy in ("allow", "refuse", "count") else words
    )


def _transform(value: Mapping[str, Any]) -> str:
    shown = {key: value[key] for key in _SHOWN_OF_TRANSFORM if key in value}
    rest = _in_words({**shown, "keep": _kept(shown.get("keep"))})
    return ", ".join([_in_words(value["transform"]), *_chat(value.get("chat")), *([rest] if rest != "nothing" else [])])


def _kept(value: Any) -> Any:
    """Kept columns, with the types that were asked for."""
    if not isinstance(value, list) or not all(isinstance(pair, list) for pair in value):
        return value
    return " and ".join(" as ".join(map(_in_words, filter(None, pair))) for pair in value)


def _chat(value: Any) -> list[str]:
    """How conversations became text, if there were any; pairs and prompts may be joined without a template."""
    if not isinstance(value, Mapping) or not value:
        return []
    return ["chat template"] if "template" in value else [f"{_in_words(value.get('format'))} joined as plain text"]


def _skipped(value: Mapping[str, Any]) -> str:
    rows, reasons = value["rows"], value.get("by_reason")
    if type(rows) is not int:
        return _in_words(value)
    return "nothing" if rows == 0 else f"{counted(rows, 'row')} ({_in_words(reasons)})"


def _packing(value: Mapping[str, Any]) -> str:
    indexes = value["indexes"]
    return f"rows are counted for {', '.join(indexes)}" if isinstance(indexes, Mapping) else _in_words(value)


# How an attribute is shown, and which fields it must have for that.
_TELLERS: Mapping[str, tuple[Callable[[Mapping[str, Any]], str], tuple[str, ...]]] = {
    "tokenizer": (_tokenizer, ("name", "vocab_size")),
    "transform": (_transform, ("transform",)),
    "skipped": (_skipped, ("rows",)),
    "packing": (_packing, ("indexes",)),
}

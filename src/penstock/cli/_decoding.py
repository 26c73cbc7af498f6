"""Samples of tokens as text, for `penstock inspect --decode`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from penstock.cli._description import Description
from penstock.errors import printable
from penstock.filesystem import local_path
from penstock.shards import ShardFolder
from penstock.transforms import Tokenize

_SHOWN_TOKENS = 256


def with_texts(description: Description, tokenizer: Path, num_samples: int) -> Description:
    """The description with columns of tokens shown as text; a note says if they were made by another tokenizer.

    Raises:
        ValueError: the dataset has no column of tokens.
    """
    folder = ShardFolder(description.path.absolute(), io="auto", check="window")
    columns = [one for one in folder.schema.shown.columns if one.kind == "ragged" and one.dtype.kind in "iu"]
    columns = [one for one in columns if not one.shape]
    if not columns:
        raise ValueError(f"{description.path}: no column of tokens to decode; the columns are {folder.schema.shown}.")
    decode = load_decoder(tokenizer)
    note = _difference(folder, tokenizer)
    texts = []
    for index, sample in enumerate(description.samples[:num_samples]):
        shown = dict(sample)
        for column in columns:
            tokens = folder.value(column, index)
            text = printable(decode(tokens[:_SHOWN_TOKENS].tolist()))
            more = " …" if len(tokens) > _SHOWN_TOKENS else ""
            shown[column.name] = f"{text}{more} ({len(tokens):,} tokens){note}"
        texts.append(shown)
    return dataclasses.replace(description, samples=tuple(texts))


def load_decoder(tokenizer: str | Path) -> Callable[[list[int]], str]:
    """From token ids to text, special tokens included.

    Raises:
        ValueError: the file is no tokenizer.json.
    """
    from tokenizers import Tokenizer

    path = local_path(tokenizer, "a tokenizer")
    try:
        found = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path}: not a tokenizer.json that can be read: {error}") from error
    return lambda ids: str(found.decode(ids, skip_special_tokens=False))


def _difference(folder: ShardFolder, tokenizer: Path) -> str:
    facts = folder.attributes.get("tokenizer")
    made = facts.get("sha256") if isinstance(facts, dict) else None
    if made is None or Tokenize(str(tokenizer)).attributes["tokenizer"]["sha256"] == made:
        return ""
    return f" [made with another tokenizer: {facts.get('name')}]" if isinstance(facts, dict) else ""

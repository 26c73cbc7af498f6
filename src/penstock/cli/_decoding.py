"""Samples of tokens as text, for `penstock inspect --decode`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from penstock.cli._description import Description
from penstock.errors import printable
from penstock.shards import ShardFolder
from penstock.transforms import Tokenize, find_decoder

_SHOWN_TOKENS = 256


def with_texts(description: Description, tokenizer: str | None) -> Description:
    """The description with columns of tokens shown as text; a note says if they were made by another tokenizer.

    Without a tokenizer nothing changes, unless tokens are bytes, which need none.

    Raises:
        ValueError: a tokenizer is given, but the dataset has no column of tokens.
    """
    decoder = find_decoder(tokenizer, {} if tokenizer is not None else _made_with(description))
    if decoder is None:
        return description
    folder = ShardFolder(description.path.absolute(), io="auto", check="window")
    columns = [one for one in folder.schema.shown.columns if one.kind == "ragged" and one.dtype.kind in "iu"]
    columns = [one for one in columns if not one.shape]
    if not columns:
        raise ValueError(f"{description.path}: no column of tokens to decode; the columns are {folder.schema.shown}.")
    note = "" if tokenizer is None else _difference(description, tokenizer)
    texts = []
    for index, sample in enumerate(description.samples):
        shown = dict(sample)
        for column in columns:
            tokens = folder.value(column, index)
            text = printable(decoder(tokens[:_SHOWN_TOKENS]))
            more = " …" if len(tokens) > _SHOWN_TOKENS else ""
            shown[column.name] = f"{text}{more} ({len(tokens):,} tokens){note}"
        texts.append(shown)
    return dataclasses.replace(description, samples=tuple(texts), is_decoded=True)


def _made_with(description: Description) -> dict[str, str]:
    facts = description.manifest.attributes.get("tokenizer")
    if not isinstance(facts, Mapping) or not isinstance(facts.get("sha256"), str):
        return {}
    return {facts["sha256"]: str(facts.get("name"))}


def _difference(description: Description, tokenizer: str) -> str:
    made_with = _made_with(description)
    if not made_with or Tokenize(tokenizer).attributes["tokenizer"]["sha256"] in made_with:
        return ""
    return f" [made with another tokenizer: {next(iter(made_with.values()))}]"

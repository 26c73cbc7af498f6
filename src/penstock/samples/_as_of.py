"""A dataset as it was before samples were appended to it.

Appending writes new shards behind the old ones and leaves those as they are, and a dataset's fingerprint is a digest of
its list of shards. So what a folder held earlier is found by its fingerprint: it is the first shards of today's list.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import DatasetChanged
from penstock.identity import digest
from penstock.shards import read_manifest


def find_earlier(path: Path, as_of: str | Mapping[str, Any]) -> str:
    """The fingerprint of the storage then, from the state of a loader or any fingerprint of the dataset.

    Raises:
        DatasetChanged: the folder does not begin with what it held then.
        ValueError: the state does not name a single whole dataset.
    """
    wanted = as_of if isinstance(as_of, str) else _data_of(as_of)
    manifest = read_manifest(path)
    schema = repr(manifest.schema.shown.to_json())
    for own, _ in manifest.as_it_grew():
        if wanted in (own, digest(own), digest(f"{own}\n{schema}")):  # the storage, all its rows, the dataset
            return own
    raise DatasetChanged(
        f"{path}: its first shards never had the fingerprint {wanted[:64]}. Either it was not only appended to "
        "since, or that is of a part of it (a split, a filter): give the one that `penstock inspect` showed then."
    )


def _data_of(state: Mapping[str, Any]) -> str:
    facts = state.get("facts") if isinstance(state, Mapping) else None
    data = facts.get("data") if isinstance(facts, Mapping) else None
    if not isinstance(data, str):
        raise ValueError(
            f"as_of={reprlib.repr(state)}: not the state of a plan over one dataset. For a source of a mixture, "
            "give its fingerprint."
        )
    return data

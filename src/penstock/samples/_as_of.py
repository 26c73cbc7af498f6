"""A dataset as it was before samples were appended to it.

Appending writes new shards behind the old ones and leaves those as they are, and a dataset's fingerprint is a digest of
its list of shards. So what a folder held earlier is found by its fingerprint: it is the first shards of today's list.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import DatasetChanged
from penstock.identity import digest
from penstock.shards import Manifest, read_manifest


def find_earlier(path: Path, as_of: str | Mapping[str, Any]) -> str:
    """The fingerprint of the storage then, from the state of a loader or any fingerprint of the dataset.

    Raises:
        DatasetChanged: the folder does not begin with what it held then.
        ValueError: the state does not name a single whole dataset.
    """
    wanted = as_of if isinstance(as_of, str) else _data_of(as_of)
    for earlier in read_manifest(path).as_it_grew():
        if wanted in _fingerprints(earlier):
            return earlier.fingerprint
    raise DatasetChanged(
        f"{path}: no first shards of it have the fingerprint {wanted[:64]}. It was not only appended to since, or the "
        "fingerprint is of a part of it (a split, a filter): give the one that `penstock inspect` showed then."
    )


def _fingerprints(manifest: Manifest) -> set[str]:
    """What the storage, the rows of the whole dataset, and the dataset call it."""
    own = manifest.fingerprint
    return {own, digest(own), digest(f"{own}\n{manifest.schema.shown.to_json()!r}")}


def _data_of(state: Mapping[str, Any]) -> str:
    facts = state.get("facts") if isinstance(state, Mapping) else None
    data = facts.get("data") if isinstance(facts, Mapping) else None
    if not isinstance(data, str):
        shown = json.dumps(state, default=str)[:200] if isinstance(state, Mapping) else repr(state)[:200]
        raise ValueError(
            f"as_of={shown}: not the state of a plan over one dataset. Of a mixture's source, give the fingerprint."
        )
    return data

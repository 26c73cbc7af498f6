"""What a manifest may say beside the data: JSON that every program reads alike and can show.

Python's own reader takes more than JSON is: `NaN`, `1e400` as infinity, half of a surrogate pair, a thousand
levels of lists. Whoever passed that on, to a file or a screen, would fail far from the manifest that brought it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

_MAX_LEVELS = 100


def copy_attributes(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """A private copy, as it will come back from the manifest.

    Raises:
        ValueError: a manifest cannot keep it.
    """
    try:
        copy: dict[str, Any] = json.loads(json.dumps(dict(attributes)))
        check_attributes(copy)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"attributes must be JSON, as the manifest is: {error}.") from None
    return copy


def check_attributes(attributes: Mapping[str, Any]) -> None:
    """Refuse, by `ValueError`, what Python reads from a manifest and others would not."""
    level: list[Any] = [attributes]
    for _ in range(_MAX_LEVELS):
        level = [part for value in level for part in _parts(value)]
    if level:
        raise ValueError(f"more than {_MAX_LEVELS} levels of lists and objects in each other")
    json.dumps(attributes, allow_nan=False, ensure_ascii=False).encode()


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()

"""Plain data as TOML: the writing half of plan files.

The standard library reads TOML and does not write it. A plan file needs tables, arrays of tables, and values that
JSON knows; that is all there is here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

_OUR_KEYS = {"source", "mix", "stages"}


def write_toml(fields: Mapping[str, Any]) -> str:
    """TOML of `fields`: dicts become tables, lists of dicts arrays of tables, and all else values of their table."""
    return "\n".join(_table_lines(fields, "")) + "\n"


def _table_lines(fields: Mapping[str, Any], path: str) -> Iterator[str]:
    tables = {key: value for key, value in fields.items() if _is_table(value)}
    values = {key: value for key, value in fields.items() if key not in tables}
    if values:
        yield from [f"[{path}]"] if path else []
        yield from (f"{key} = {_value(value)}" for key, value in values.items())
        yield ""
    for key, table in tables.items():
        name = key if key in _OUR_KEYS else _value(key)  # names that people chose are quoted
        inner = f"{path}.{name}" if path else name
        if isinstance(table, Mapping):
            yield from _table_lines(table, inner)
        else:
            for item in table:
                yield from (f"[[{inner}]]", *(f"{key} = {_value(value)}" for key, value in item.items()), "")


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, list) and bool(value) and isinstance(value[0], Mapping))


def _value(value: Any) -> str:
    """TOML of one value. JSON is nearly that, except that TOML escapes DEL."""
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{_value(key)} = {_value(item)}' for key, item in value.items())} }}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")

"""Columns inside columns: "conversation.turns" is the field `turns` of the column `conversation`.

A column with exactly that name takes precedence: CSV files have `sepal.length`, and tars have members `seg.png`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from penstock.errors import SchemaError, did_you_mean
from penstock.sources._arrow import arrow


def top_level(name: str, known: Iterable[str]) -> str:
    """The column that a name is in: one of `known`, or the name itself if it is in none of them."""
    root = name.partition(".")[0]
    return root if name not in known and root in known else name


def with_roots(names: Sequence[str]) -> tuple[str, ...]:
    """The names, and every column that they may be in."""
    return tuple(dict.fromkeys(each for name in names for each in (name, name.partition(".")[0])))


def names_within(types: Mapping[str, Any]) -> Iterator[str]:
    """Names of columns of these Arrow types, and of the fields in them."""
    for name, kind in types.items():
        yield name
        if kind is not None and arrow().types.is_struct(kind):
            yield from names_within({f"{name}.{field.name}": field.type for field in kind})


def fields_within(item: Mapping[Any, Any]) -> Iterator[str]:
    """Names of the fields of a record, and of those in them."""
    for name, value in item.items():
        yield str(name)
        if isinstance(value, Mapping):
            yield from (f"{name}.{field}" for field in fields_within(value))


def value_at(item: Mapping[str, Any], name: str) -> Any:
    """A value of a record; None if it has none.

    >>> value_at({"a": {"b": 1}, "c.d": 2}, "a.b"), value_at({"c.d": 2}, "c.d"), value_at({"a": 3}, "a.b")
    (1, 2, None)
    """
    if name in item or "." not in name:
        return item.get(name)
    found: Any = item
    for field in name.split("."):
        found = found.get(field) if isinstance(found, Mapping) else None
    return found


def select_nested(batch: Any, names: Sequence[str], path: str) -> Any:
    """An Arrow batch with these columns, top-level or nested."""
    columns = [dig(batch.column(top_level(name, batch.schema.names)), name, path, batch.schema.names) for name in names]
    return arrow().RecordBatch.from_arrays(columns, names=list(names))


def check_fields(schema: Any, names: Sequence[str] | None, path: str) -> None:
    """Refuse names of fields that an Arrow schema does not have.

    Raises:
        SchemaError: a field is missing; the message says which, and where.
    """
    for name in names or ():
        if name not in schema.names:
            _walk(schema.field(top_level(name, schema.names)).type, name, path)


def _walk(kind: Any, name: str, path: str) -> None:
    for field in name.split(".")[1:]:
        if not arrow().types.is_struct(kind) or kind.get_field_index(field) < 0:
            fields = [each.name for each in kind] if arrow().types.is_struct(kind) else []
            raise SchemaError(
                f"{path}: no column {name!r}: there is no field {field!r} in values of type {kind}."
                f"{did_you_mean(field, fields)}"
            )
        kind = kind.field(field).type


def dig(column: Any, name: str, path: str, known: Iterable[str]) -> Any:
    """The column called `name`, extracted from the one that contains it.

    Raises:
        SchemaError: there is no such field.
    """
    if name in known:
        return column
    _walk(column.type, name, path)
    for field in name.split(".")[1:]:
        column = arrow("compute").struct_field(column, field)
    return column

"""Check the shape of plain data from files and saved states, which may come from strangers.

A shape looks like the data it describes, and `find_mismatch` says where a value does not fit:

    int, str, bool, None      a value of exactly this type
    float                     a number of either kind
    range(0, 9)               an integer in the range
    re.compile(...)           text that fully matches the pattern
    frozenset({"a", "b"})     one of these texts
    [shape]                   a list whose items all fit
    (shape, shape)            a list of exactly these items
    {"key": shape}            an object with at least these keys
    {str: shape}              an object with text keys whose values all fit
    Either(shape, shape)      whatever fits one of them
    object                    anything

May import: nothing. Imported by: `loader`, `preparation`, `pytorch`, `service`, `sources`. Holds no state.
"""

import re
import reprlib
from collections.abc import Mapping
from typing import Any

COUNT = range(1 << 48)
"""Far above any real count, far below what overflows an int64."""


class Either:
    """Fits whatever one of several shapes fits."""

    def __init__(self, *shapes: Any) -> None:
        self.shapes = shapes


def find_mismatch(value: Any, shape: Any, where: str = "it") -> str | None:
    """What is wrong with a value, and where in it; None if it fits.

    >>> find_mismatch({"tasks": [1, 2, "x"]}, {"tasks": [COUNT]})
    "it['tasks'][2] is 'x', not an integer from 0 to 281474976710655"
    """
    if isinstance(shape, Either):
        found = [find_mismatch(value, each, where) for each in shape.shapes]
        return None if None in found else found[-1]
    if isinstance(shape, dict):
        return _mismatch_in_object(value, shape, where)
    if isinstance(shape, list | tuple):
        return _mismatch_in_list(value, shape, where)
    return None if _fits(value, shape) else f"{where} is {reprlib.repr(value)}, not {_in_words(shape)}"


def _mismatch_in_object(value: Any, shape: dict[Any, Any], where: str) -> str | None:
    if not isinstance(value, Mapping):
        return f"{where} is {reprlib.repr(value)}, not an object"
    if str in shape:
        parts = ((key, each, shape[str]) for key, each in value.items())
    else:
        missing = [key for key in shape if key not in value]
        if missing:
            return f"{where} lacks {missing[0]!r}"
        parts = ((key, value[key], each) for key, each in shape.items())
    for key, part, its_shape in parts:
        if type(key) is not str:
            return f"{where} has the key {reprlib.repr(key)}, not text"
        if (found := find_mismatch(part, its_shape, f"{where}[{reprlib.repr(key)}]")) is not None:
            return found
    return None


def _mismatch_in_list(value: Any, shape: list[Any] | tuple[Any, ...], where: str) -> str | None:
    if not isinstance(value, list | tuple):
        return f"{where} is {reprlib.repr(value)}, not a list"
    if isinstance(shape, tuple) and len(value) != len(shape):
        return f"{where} has {len(value):,} items, not {len(shape)}"
    shapes = shape if isinstance(shape, tuple) else shape * len(value)
    found = (find_mismatch(*pair, f"{where}[{place}]") for place, pair in enumerate(zip(value, shapes, strict=True)))
    return next((each for each in found if each is not None), None)


def _fits(value: Any, shape: Any) -> bool:
    if shape is object:
        return True
    if shape is None:
        return value is None
    if isinstance(shape, range):
        return type(value) is int and value in shape
    if isinstance(shape, re.Pattern):
        return type(value) is str and shape.fullmatch(value) is not None
    if isinstance(shape, frozenset):
        return type(value) is str and value in shape
    return type(value) is shape or (shape is float and type(value) is int)


def _in_words(shape: Any) -> str:
    if isinstance(shape, range):
        return f"an integer from {shape.start} to {shape.stop - 1}"
    if isinstance(shape, re.Pattern):
        return f"text like {shape.pattern!r}"
    if isinstance(shape, frozenset):
        return f"one of {', '.join(sorted(map(repr, shape)))}"
    return "None" if shape is None else {int: "an integer", str: "text", bool: "a boolean"}.get(shape, "a number")

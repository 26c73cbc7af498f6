"""What is read off the arguments before anything is planned: columns, classes, expected sizes, patterns."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from penstock.preparation._plan import MIN_IMAGE_TASK_BYTES, MIN_TASK_BYTES
from penstock.sources import SourceFile, SourceOptions, class_names
from penstock.transforms import Transform


def pin_reading(reading: SourceOptions, transform: Transform, files: Sequence[SourceFile]) -> SourceOptions:
    """Options that say what the sources said: the classes of images, and no column that nobody reads."""
    classes = class_names(files)
    if classes and reading.classes is None:
        reading = dataclasses.replace(reading, classes=classes)
    needed = getattr(transform, "input_columns", None)
    if reading.columns is None and needed is not None:
        reading = dataclasses.replace(reading, columns=tuple(needed))
    return reading


def expected_ratio(transform: Transform) -> float:
    """Bytes of output expected for a byte of input: a token is about four bytes of text."""
    columns = transform.columns() or {}
    widths = {"uint8[*]": 1, "uint16[*]": 2, "uint32[*]": 4}
    width = widths.get(columns.get("tokens", ""))
    is_bytes = transform.attributes.get("tokenizer", {}).get("kind") == "bytes"
    return 1.0 if width is None else width * (1.0 if is_bytes else 0.25)


def least_task_bytes(transform: Transform) -> int:
    """Input below which a task is not worth cutting: decoding an image takes eight times as long a byte as text."""
    return MIN_IMAGE_TASK_BYTES if "images" in transform.attributes else MIN_TASK_BYTES


def patterns_of(sources: Any) -> tuple[str, ...]:
    """What to look for new files with; nothing for objects of this process."""
    given = sources if isinstance(sources, (list, tuple)) else [sources]
    texts = [os.fspath(each) for each in given if isinstance(each, (str, os.PathLike))]
    absolute = (text if "://" in text else os.path.abspath(os.path.expanduser(text)) for text in texts)
    return tuple(dict.fromkeys(absolute))

"""Parse what people type as values of flags."""

import argparse
import csv
import json
import os
import re
from pathlib import Path
from typing import Any

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def seed(text: str) -> int | str:
    """A seed, or "auto"."""
    return text if text == "auto" else int(text)


def workers(text: str) -> int | str:
    """A number of processes, or "auto"."""
    if text == "auto":
        return text
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processes, or 'auto'")
    return int(text)


def rows_or_share(text: str) -> int | float:
    """A number of rows, or a share of them."""
    try:
        if text.endswith("%"):
            return float(text[:-1]) / 100
        return int(text) if text.isdigit() else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of rows, or a share such as 0.5 or 50%") from None


def path(text: str) -> Path:
    """A path on this machine; a shell does not expand the `~` in `--html=~/report.html`."""
    return Path(text).expanduser()


def output(text: str) -> Path:
    """A file that can be written: nobody wants to learn after minutes of measuring that it cannot."""
    found = path(text)
    if found.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder, not a file to write")
    if not found.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: there is no folder {str(found.parent)!r}")
    if not os.access(found if found.exists() else found.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written")
    return found


def names(text: str) -> tuple[str, ...]:
    """Names separated by commas, quoted if they contain one."""
    return tuple(next(csv.reader([text]), ()))


def word_or_names(text: str) -> str | tuple[str, ...]:
    """One name, or several."""
    found = names(text)
    return found[0] if len(found) == 1 else found


def types(text: str) -> dict[str, str] | str:
    """ "infer", or a type for each of some names."""
    if text == "infer":
        return text
    pairs = [each.rpartition("=") for each in names(text)]
    if not all(name and kind for name, _, kind in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is neither 'infer' nor a list such as age=int64,score=float32")
    return {name: kind for name, _, kind in pairs}


def delimiter(text: str) -> str:
    """One character; a tab may be given by name."""
    return "\t" if text in ("\\t", "tab") else text


def image_size(text: str) -> int | tuple[int, int]:
    """Pixels, or height x width."""
    match = re.fullmatch(r"([1-9][0-9]*)(?:x([1-9][0-9]*))?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size in pixels, such as 224 or 256x192")
    return (int(match[1]), int(match[2])) if match[2] else int(match[1])


def size(text: str) -> int:
    """A number of bytes, with its unit."""
    match = re.fullmatch(r"([0-9]+)\s*([A-Za-z]*)", text)
    if match is None or match[2].upper() not in _UNITS or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size, such as 256MB")
    return int(match[1]) * _UNITS[match[2].upper()]


def rate(text: str) -> float:
    """Bytes per second, given in bits (25Gb) or bytes (3GB)."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kKMG])(b|B)(?:it|ps|it/s|/s)?", text)
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a bandwidth, such as 25Gb or 3GB for each second")
    return float(match[1]) * _UNITS[f"{match[2].upper()}B"] / (8 if match[3] == "b" else 1)


def mebibytes(text: str) -> int:
    """A number of bytes, given in MiB."""
    return int(text) << 20


def gigabytes(text: str) -> float:
    """A number of bytes, given in GB."""
    return 1e9 * float(text)


def shares(text: str) -> dict[str, float]:
    """Names and shares, as in val=0.02,test=1%."""
    found: dict[str, float] = {}
    for each in names(text):
        name, _, share = each.partition("=")
        value = rows_or_share(share) if share else 0
        if not name or not 0 < value < 1:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of shares such as val=0.02 or val=2%,test=1%")
        found[name] = value
    return found


def count(text: str) -> int:
    """A number, at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of samples")
    return int(text)


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is not a JSON object, such as {{"enable_thinking": false}}')
    return value

"""`penstock-settings.toml`: what tuning found, for `DataLoader(settings=...)` and for people.

    version = 1
    [loader]          options of the loader, as they are written in Python
    num_workers = 2
    [job]             your own options that `make_loader` takes
    [measured]        how fast that was, for people; and on how many processors

The file holds only plain values, and the loader checks each of them as if it were in the call.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import FormatError
from penstock.filesystem import local_path, read_small

FILE_NAME = "penstock-settings.toml"
LOADER_OPTIONS = (
    *("num_workers", "workers", "prefetch", "prefetch_factor", "pin_memory", "persistent_workers", "in_order"),
    *("batch_size", "start_method", "drop_consumed"),
)
"""Options of a loader that a settings file may contain."""
_TABLES = ("loader", "job", "measured")
_KINDS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("num_workers", "prefetch"), (int, str)),
    **dict.fromkeys(("prefetch_factor", "batch_size"), (int,)),
    **dict.fromkeys(("workers", "start_method"), (str,)),
    **dict.fromkeys(("pin_memory", "persistent_workers", "in_order", "drop_consumed"), (bool,)),
}
_KIND_NAMES = {int: "a whole number", str: "a string", bool: "true or false"}
_VERSION = 1
_LARGEST = 1 << 20
_OF_WORKERS = ("prefetch", "prefetch_factor", "persistent_workers", "workers")
_MOST_WORKERS = 4096


def format_settings(
    options: Mapping[str, Any], measured: Mapping[str, Any], *, command: str, name: str = FILE_NAME
) -> str:
    """The text of a file of that name. Values that TOML cannot express (None, the user's objects) become comments."""
    lines = [
        f"# Written by {command}. Read by penstock.DataLoader(..., settings={name!r}).",
        f"version = {_VERSION}",
    ]
    own = {name: value for name, value in options.items() if name not in LOADER_OPTIONS}
    tables = {"loader": {name: options[name] for name in options if name not in own}, "job": own, "measured": measured}
    for table, values in tables.items():
        lines += ["", f"[{table}]", *(_line(name, value) for name, value in values.items())] if values else []
    return "\n".join(lines) + "\n"


class SettingsFile(NamedTuple):
    """What a loader needs of a settings file."""

    options: dict[str, Any]
    num_cpus: int | None
    """Processors of the job that was measured; None if the file does not say."""


def read_settings(path: str | os.PathLike[str]) -> SettingsFile:
    """The loader's options in a settings file, and where they were measured.

    Raises:
        FormatError: it is not a settings file; the message says what is wrong with it.
        OSError: it cannot be read.
    """
    where = local_path(path, "a settings file")
    fields = _parse(where)
    if fields.get("version") != _VERSION:
        raise FormatError(
            f"{where}: version {fields.get('version')!r}; this Penstock reads settings of version {_VERSION}. "
            "Write them again: penstock tune JOB.py."
        )
    if misplaced := [name for name in fields if name not in ("version", *_TABLES)]:
        raise FormatError(
            f"{where}: has {', '.join(misplaced)}; there may be the tables [loader], [job] and [measured], and what a "
            "loader takes belongs under [loader]."
        )
    options = fields.get("loader", {})
    if not isinstance(options, dict) or any(
        not isinstance(value, bool | int | float | str) for value in options.values()
    ):
        raise FormatError(f"{where}: expected a table [loader] of options, each a number, a string, true or false.")
    unknown = [name for name in options if name not in LOADER_OPTIONS]
    if unknown:
        raise FormatError(
            f"{where}: [loader] has {', '.join(unknown)}; it may have {', '.join(LOADER_OPTIONS)}. "
            "Your own options belong under [job]."
        )
    for name, value in options.items():
        if type(value) not in _KINDS[name]:
            kinds = " or ".join(_KIND_NAMES[kind] for kind in _KINDS[name])
            raise FormatError(f"{where}: {name} = {json.dumps(value)}; expected {kinds}.")
    if isinstance(count := options.get("num_workers"), int) and count > _MOST_WORKERS:
        raise FormatError(f"{where}: num_workers = {count} is too large; the limit is {_MOST_WORKERS:,}.")
    measured = fields.get("measured")
    num_cpus = measured.get("processors") if isinstance(measured, dict) else None
    return SettingsFile(options, num_cpus if type(num_cpus) is int else None)


def _parse(where: Path) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(read_small(where, _LARGEST).decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"{where}: not TOML: {str(error)[:200]}") from None


def _line(name: str, value: Any) -> str:
    key = name if name.isidentifier() and name.isascii() else json.dumps(name)
    if isinstance(value, bool | int | float | str):
        return f"{key} = {json.dumps(value, ensure_ascii=False)}".replace("\x7f", "\\u007f")
    return f"# {key} = {' '.join(repr(value).split())[:200]}"


def simplify(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options without those that have no effect given the others."""
    if options.get("num_workers") == 0:
        return {name: value for name, value in options.items() if name not in _OF_WORKERS}
    return dict(options)

"""Every error Penstock raises on purpose: one class per decision that the caller can take.

    PenstockError
    ├── FormatError          (ValueError)         a file's contents are not those of a dataset
    │   └── CorruptionError                       bytes differ from their checksum: restore that file
    ├── SchemaError          (TypeError)          data or columns do not fit the schema
    ├── IncompleteDataset    (FileNotFoundError)  no finished dataset is there: prepare or write it
    ├── DatasetExists        (FileExistsError)    something is there already: append, overwrite, or move
    ├── DatasetChanged       (RuntimeError)       the data changed since it was opened: open it again
    ├── WriterBusy           (BlockingIOError)    another process is writing here: wait for it
    ├── StorageError         (OSError)            the disk refused: full, failing, or gone
    │   └── StoreError       (ConnectionError)    an object store refuses: correct what the message names
    │       ├── StoreBusy                         it failed, but may work later: try again
    │       └── ObjectMissing (FileNotFoundError) the store has no such object
    ├── StageError           (ValueError)         the stages of a plan come in a meaningless order
    ├── StateError           (ValueError)         a saved state does not belong to this order of the data
    ├── ScriptError          (RuntimeError)       workers cannot import the script: guard it, or move its functions
    ├── WorkerDied           (RuntimeError)       worker processes kept dying on the same work
    ├── ServiceError         (ConnectionError)    no server delivers batches: start one, or fix what it refuses
    ├── RemoteFailed         (RuntimeError)       your function failed on a server: fix the function
    ├── TransformFailed      (RuntimeError)       your function failed on a batch: fix the function
    ├── EngineFailed         (RuntimeError)       a tokenizer library failed: use the other engine
    ├── TokenizerMismatch    (RuntimeError)       two engines gave different tokens: use engine="reference"
    └── MissingExtra         (ImportError)        an optional package is needed: install the extra

Each also inherits the builtin that people already catch. A wrong argument is a plain `ValueError` or `TypeError`.
Messages quote names and values from files, which may come from strangers, so `printable` escapes control characters
wherever such text is shown.

May import: nothing. Imported by: `cli`, `dataset`, `doctor`, `filesystem`, `loader`, `masks`, `plan`, `preparation`,
`pytorch`, `remote`, `report`, `schema`, `service`, `shards`, `sources`, `transforms`, `tuning`, `watching`, `workers`.
Holds no state.
"""

import operator
import re
from collections.abc import Iterable, Sequence

# Whatever moves the cursor, clears the screen, writes to the clipboard, ends a line or reverses text; lone surrogates.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class PenstockError(Exception):
    """Anything Penstock raises on purpose."""

    def __str__(self) -> str:
        return printable(super().__str__(), keep="\n\t")


class FormatError(PenstockError, ValueError):
    """A file's contents are not what this version of the format requires."""


class CorruptionError(FormatError):
    """Bytes on disk differ from the checksum written with them."""


class SchemaError(PenstockError, TypeError):
    """Data, or a requested column, does not fit the schema."""


class IncompleteDataset(PenstockError, FileNotFoundError):
    """No finished dataset is at this path."""


class DatasetExists(PenstockError, FileExistsError):
    """Something is at this path already, and nothing allows replacing it."""


class DatasetChanged(PenstockError, RuntimeError):
    """The dataset at this path is not the one that was opened."""


class WriterBusy(PenstockError, BlockingIOError):
    """Another process is writing this dataset."""


class StorageError(PenstockError, OSError):
    """The file system refused to read or write: full, failing, or gone."""


class StoreError(StorageError, ConnectionError):
    """An object store refuses, for the reason that the message gives."""


class StoreBusy(StoreError):
    """An object store failed in a way that may pass: no answer, a broken connection, too many requests."""


class ObjectMissing(StoreError, FileNotFoundError):
    """An object store has no object of this name."""


class StageError(PenstockError, ValueError):
    """The stages of a plan come in an order that makes no sense."""


class StateError(PenstockError, ValueError):
    """A saved state cannot be honoured; the message names what differs."""


class ScriptError(PenstockError, RuntimeError, TypeError):
    """Worker processes cannot import the user's script, where a function of theirs is.

    It is raised again where the user called, so that it is not preceded by ours.
    """


class WorkerDied(PenstockError, RuntimeError):
    """Worker processes were killed or crashed, several times, on the same work."""


class ServiceError(PenstockError, ConnectionError):
    """No server answers, or they refuse; the message names each with its reason."""


class RemoteFailed(PenstockError, RuntimeError):
    """Computing a batch failed on a server; the message includes the server's traceback."""


class TransformFailed(PenstockError, RuntimeError):
    """A user's function failed on a batch, but on no single row of it."""


class EngineFailed(PenstockError, RuntimeError):
    """A tokenizer library failed, or does not support this tokenizer."""


class TokenizerMismatch(PenstockError, RuntimeError):
    """Two tokenizer engines that must agree gave different tokens for one document."""


class MissingExtra(PenstockError, ImportError):
    """An optional package is needed; the message names the extra to install."""


def check_choice(name: str, value: object, choices: tuple[object, ...], *, verb: str = "") -> None:
    """Raise `ValueError` unless an argument, of `verb` if that helps to find it, is one of the choices."""
    if value not in choices:
        *others, last = map(repr, choices)
        said = f"{verb}({name}={value!r}):" if verb else f"{name}={value!r};"
        raise ValueError(f"{said} the choices are {', '.join(others)} and {last}.")


def whole_number(
    verb: str, name: str, value: object, *, at_least: int | None = None, at_most: int | None = None
) -> int:
    """`value` as a Python int, even if it is numpy's or torch's.

    Raises:
        TypeError: it is not an integer, or is a bool.
        ValueError: it is out of range.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{verb}({name}={value!r}): the {name} must be an int, not {type(value).__name__}.")
    if at_least is not None and number < at_least:
        raise ValueError(f"{verb}({name}={number}): the {name} must be at least {at_least:,}.")
    if at_most is not None and number > at_most:
        raise ValueError(f"{verb}({name}={number}): the {name} must be at most {at_most:,}.")
    return number


def did_you_mean(typed: str, known: Iterable[str]) -> str:
    """A question to end a message with, if one of the known names resembles what was typed; otherwise nothing.

    >>> did_you_mean("txet", ["label", "text"]), did_you_mean("x", ["label", "text"])
    (" Did you mean 'text'?", '')
    """
    near = nearest_name(typed, known)
    return "" if near is None else f" Did you mean {near!r}?"


def nearest_name(typed: str, known: Iterable[str]) -> str | None:
    """The known name closest to what was typed, if any is close."""
    import difflib

    names = {name.casefold(): name for name in known}
    near = difflib.get_close_matches(typed.casefold(), names, n=1)
    return names[near[0]] if near else None


def first_few(texts: Sequence[str], most: int) -> str:
    """The texts, separated by commas; if there are more than `most`, three dots stand for the rest.

    >>> first_few(["a", "b", "c"], 2)
    'a, b, …'
    """
    return ", ".join([*texts[:most], "…"] if len(texts) > most else texts)


def counted(number: int, noun: str) -> str:
    """A number and its noun, for messages.

    >>> counted(1, "row"), counted(2500, "row")
    ('1 row', '2,500 rows')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def printable(text: str, *, keep: str = "") -> str:
    """Make text that may come from a stranger safe to show: escape control characters, except those in `keep`.

    >>> printable("red: \\x1b[31m, two\\nlines")
    'red: \\\\x1b[31m, two\\\\nlines'
    """
    return _CONTROL.sub(lambda match: match[0] if match[0] in keep else _escape(match[0]), text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()

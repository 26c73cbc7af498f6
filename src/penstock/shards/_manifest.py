"""`manifest.json`: what a dataset holds; its presence means that the dataset is complete.

It lists every shard with its counts, size and header checksum, so opening a dataset touches no
shard. It ends with its own checksum. Nothing in it depends on time, host or the number of workers:
the same data gives the same bytes. It may come from strangers, so every field is checked before
anything is opened or allocated because of it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from penstock.errors import CorruptionError, FormatError, IncompleteDataset, SchemaError, first_few
from penstock.filesystem import lock_holder, open_regular, similar_path, storage_errors
from penstock.identity import GrowingDigest, digest
from penstock.schema import Schema
from penstock.shards._layout import ALIGNMENT, MAX_HEADER_BYTES, checksum

MANIFEST_NAME = "manifest.json"
WORK_FOLDER = ".writing"
VERSION = 1
MAX_MANIFEST_BYTES = 256 << 20  # 100,000 shards take about 20 MB
_MAX_COUNT = 1 << 48  # far above any dataset, far below what overflows an int64
_SHARD_NAME = re.compile(r"shard-[0-9]{6,12}-[0-9a-f]{16}\.safetensors", re.ASCII)
_PROVENANCE_NAME = re.compile(r"provenance-[0-9a-f]{16}\.json", re.ASCII)
_CHECKSUM = re.compile(r"[0-9a-f]{8}", re.ASCII)
_CLOSING = re.compile(rb',\n "crc32c": "([0-9a-f]{8})"\n}\n')
_CLOSING_BYTES = 26
_MAX_LEVELS = 100
_SHOWN_FOLDERS = 5


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """A shard's entry in the manifest."""

    name: str
    num_samples: int
    num_values: Mapping[str, int]
    """Elements in each ragged column."""
    num_bytes: int
    """Size of the file."""
    header_bytes: int
    header_checksum: int

    def to_json(self) -> dict[str, Any]:
        """Its entry in the manifest."""
        return {
            "name": self.name,
            "samples": self.num_samples,
            "values": dict(self.num_values),
            "bytes": self.num_bytes,
            "header_bytes": self.header_bytes,
            "header_crc32c": f"{self.header_checksum:08x}",
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`; `KeyError`, `TypeError`, `ValueError` or `AttributeError` on anything else."""
        if not _is_shard_name(fields["name"]):
            raise ValueError(f"{reprlib.repr(fields['name'])} is not the name of a shard")
        return cls(
            name=fields["name"],
            num_samples=_count(fields["samples"]),
            num_values={str(column): _count(count) for column, count in fields["values"].items()},
            num_bytes=_count(fields["bytes"]),
            header_bytes=_count(fields["header_bytes"]),
            header_checksum=_checksum(fields["header_crc32c"]),
        )


@dataclass(frozen=True, slots=True)
class FileEntry:
    """The entry of a file that is not a shard."""

    name: str
    num_bytes: int
    checksum: int

    def to_json(self) -> dict[str, Any]:
        """Its entry in the manifest."""
        return {"name": self.name, "bytes": self.num_bytes, "crc32c": f"{self.checksum:08x}"}


@dataclass(frozen=True, slots=True)
class Manifest:
    """Schema, shards in order, and what else is known about the data."""

    schema: Schema
    shards: tuple[ShardEntry, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """Free-form JSON: tokenizer, packing, what was skipped."""
    provenance: FileEntry | None = None
    """Where the samples came from, in a separate file (`_provenance`)."""

    @property
    def num_samples(self) -> int:
        """Samples in all shards."""
        return sum(shard.num_samples for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.num_bytes for shard in self.shards)

    @property
    def file_names(self) -> frozenset[str]:
        """Names of all files of the dataset except the manifest."""
        return frozenset(entry.name for entry in self.files)

    @property
    def files(self) -> tuple[ShardEntry | FileEntry, ...]:
        """All files of the dataset except the manifest."""
        return self.shards if self.provenance is None else (*self.shards, self.provenance)

    @property
    def fingerprint(self) -> str:
        """Digest of schema and shards; attributes do not count."""
        return digest("\n".join(self._identity()))

    def as_it_grew(self) -> Iterator[tuple[str, int]]:
        """(fingerprint, number of shards) of this manifest, then of those with fewer and fewer of its shards.

        That is how it was before the last were appended. Each shard is hashed once.
        """
        growing, found = GrowingDigest(), []
        for num_shards, line in enumerate(self._identity()):
            found.append((growing.add(line if num_shards == 0 else f"\n{line}"), num_shards))
        return reversed(found)

    def num_shards_beside(self, other: Manifest) -> int:
        """How many shards it has that the other has not."""
        return len({shard.name for shard in self.shards} - other.file_names)

    def first_shards(self, num_shards: int) -> Manifest:
        """The manifest of the first shards only."""
        return dataclasses.replace(self, shards=self.shards[:num_shards])

    def _identity(self) -> Iterator[str]:
        yield json.dumps(self.schema.to_json())
        for shard in self.shards:
            yield f"{shard.name} {shard.num_samples} {shard.num_bytes} {shard.header_checksum}"

    def to_bytes(self) -> bytes:
        """The file: JSON whose last line is the checksum of everything before it."""
        head: dict[str, Any] = {
            "format": "penstock",
            "version": VERSION,
            "columns": self.schema.to_json(),
            "samples": self.num_samples,
            "attributes": dict(self.attributes),
        }
        if self.provenance is not None:
            head["provenance"] = self.provenance.to_json()
        lines = [f" {json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in head.items()]
        shards = ",\n".join(f"  {json.dumps(shard.to_json())}" for shard in self.shards)
        lines.append(f' "shards": [\n{shards}\n ]')
        text = ("{\n" + ",\n".join(lines)).encode()
        return text + f',\n "crc32c": "{checksum(text):08x}"\n}}\n'.encode()


def read_manifest(directory: Path) -> Manifest:
    """Manifest of the finished dataset in `directory`.

    Raises:
        IncompleteDataset: there is none.
        FormatError: it is damaged, hostile, or of a newer version.
        StorageError: it cannot be read.
    """
    path = directory / MANIFEST_NAME
    try:
        descriptor = open_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        raise IncompleteDataset(_why_incomplete(directory)) from None
    with storage_errors(path, doing="read"), os.fdopen(descriptor, "rb") as file:
        # Python allocates as much memory as it is asked to read, so ask for the file's size.
        raw = file.read(min(os.fstat(descriptor).st_size, MAX_MANIFEST_BYTES) + 1)
    return parse_manifest(raw, str(path))


def parse_manifest(raw: bytes, where: str) -> Manifest:
    """Parse the bytes of a manifest; `where` names the file in errors."""
    if len(raw) > MAX_MANIFEST_BYTES:
        raise FormatError(f"{where}: longer than {MAX_MANIFEST_BYTES:,} bytes, the limit for manifests.")
    closing = _CLOSING.fullmatch(raw[-_CLOSING_BYTES:])
    if closing is None or int(closing[1], 16) != checksum(raw[:-_CLOSING_BYTES]):
        raise CorruptionError(
            f"{where}: the manifest does not match the checksum in its last line; it is damaged, truncated "
            "or was edited. Restore it from a copy, or remove the folder and prepare the dataset again."
        )
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: not JSON ({type(error).__name__}: {error}).") from None
    return _check_manifest(fields, where)


def _check_manifest(fields: Any, where: str) -> Manifest:
    if not isinstance(fields, dict) or fields.get("format") != "penstock":
        raise FormatError(f"{where}: not the manifest of a Penstock dataset.")
    version = fields.get("version")
    if type(version) is not int or version != VERSION:
        raise FormatError(
            f"{where}: format version {reprlib.repr(version)}; this Penstock reads version {VERSION}. "
            "Install a newer Penstock."
        )
    columns, shards, attributes = fields.get("columns"), fields.get("shards"), fields.get("attributes")
    if not isinstance(columns, dict) or not isinstance(shards, list) or not isinstance(attributes, dict):
        raise FormatError(f"{where}: 'columns', 'shards' and 'attributes' must be an object, a list and an object.")
    try:
        schema = Schema.parse_stored(columns)
    except SchemaError as error:
        raise FormatError(f"{where}: {error}") from None
    try:
        check_attributes(attributes)
    except ValueError as error:
        raise FormatError(f"{where}: the attributes are not valid JSON: {error}.") from None
    ragged = {column.name for column in schema.stored.columns if column.is_ragged}
    manifest = Manifest(
        schema,
        tuple(_check_shard(entry, ragged, where) for entry in shards),
        attributes,
        _check_provenance(fields.get("provenance"), where),
    )
    _check_totals(manifest, fields.get("samples"), where)
    return manifest


def _check_totals(manifest: Manifest, samples: Any, where: str) -> None:
    if len({shard.name for shard in manifest.shards}) != len(manifest.shards):
        raise FormatError(f"{where}: a shard is named twice.")
    if type(samples) is not int or samples != manifest.num_samples or samples > _MAX_COUNT:
        raise FormatError(
            f"{where}: 'samples' is {reprlib.repr(samples)}, but the shards hold {manifest.num_samples:,} "
            f"({_MAX_COUNT:,} is the limit)."
        )
    for column in (column.name for column in manifest.schema.stored.columns if column.is_ragged):
        num_values = sum(shard.num_values[column] for shard in manifest.shards)
        if num_values > _MAX_COUNT:
            raise FormatError(f"{where}: column {column!r} has {num_values:,} values; {_MAX_COUNT:,} is the limit.")


def _check_shard(entry: Any, ragged: set[str], where: str) -> ShardEntry:
    try:
        shard = ShardEntry.from_json(entry)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        name = entry.get("name") if isinstance(entry, dict) else None
        if not _is_shard_name(name):
            raise FormatError(f"{where}: {reprlib.repr(name)} is not the name of a shard.") from None
        raise FormatError(f"{where}: the entry of {name} is incomplete ({type(error).__name__}: {error}).") from None
    if shard.num_values.keys() != ragged:
        raise FormatError(
            f"{where}: the entry of {shard.name} counts values of {reprlib.repr(sorted(shard.num_values))}, "
            f"not of {sorted(ragged)}."
        )
    if not 0 < shard.header_bytes <= MAX_HEADER_BYTES or shard.header_bytes % ALIGNMENT:
        raise FormatError(
            f"{where}: {shard.name} has a header of {shard.header_bytes:,} bytes; "
            f"it must be a multiple of {ALIGNMENT:,}, and {MAX_HEADER_BYTES:,} is the limit."
        )
    return shard


def _is_shard_name(name: object) -> bool:
    return type(name) is str and _SHARD_NAME.fullmatch(name) is not None


def is_file_of_a_dataset(name: str) -> bool:
    """Whether a shard or a provenance file may be called so, and nothing else that Penstock writes."""
    return _is_shard_name(name) or _PROVENANCE_NAME.fullmatch(name) is not None


def _check_provenance(entry: Any, where: str) -> FileEntry | None:
    if entry is None:
        return None
    name = entry.get("name") if isinstance(entry, dict) else None
    if not isinstance(name, str) or not _PROVENANCE_NAME.fullmatch(name):
        raise FormatError(f"{where}: {reprlib.repr(name)} is not the name of a provenance file.")
    try:
        return FileEntry(name, _count(entry["bytes"]), _checksum(entry["crc32c"]))
    except (KeyError, ValueError) as error:
        raise FormatError(f"{where}: the entry of {name} is incomplete ({type(error).__name__}: {error}).") from None


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_COUNT:
        raise ValueError(f"{reprlib.repr(value)} is not a count")
    return value


def _checksum(value: object) -> int:
    if not isinstance(value, str) or not _CHECKSUM.fullmatch(value):
        raise ValueError(f"{reprlib.repr(value)} is not a checksum")
    return int(value, 16)


def _why_incomplete(directory: Path) -> str:
    if directory.is_file():
        return f"{directory}: no dataset is there (a dataset is a folder, and this is a file)."
    if not directory.is_dir():
        return f"{directory}: no dataset is there (the folder does not exist).{similar_path(directory)}"
    holder = lock_holder(directory)
    if holder is not None:
        return f"{directory}: not finished; {holder} is writing it, or was stopped while writing."
    if (directory / WORK_FOLDER).exists():
        return f"{directory}: not finished; its writer was stopped. Write or prepare it again."
    inside = sorted(path.parent.name for path in directory.glob(f"*/{MANIFEST_NAME}"))
    if inside:
        shown = first_few(inside, _SHOWN_FOLDERS)
        return f"{directory}: not a dataset itself, but a folder of datasets ({shown}): open {directory / inside[0]}."
    return f"{directory}: no dataset is there ({MANIFEST_NAME} is missing)."


def classes_of(attributes: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the classes in the order of their labels; empty when the dataset has none."""
    names: Any = attributes.get("classes")
    if names is None:  # where older datasets have them
        names = attributes
        for key in ("preparation", "recipe", "reading", "classes"):
            names = names.get(key) if isinstance(names, Mapping) else None
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return tuple(names) if is_list else ()


def tokenizers_of(attributes: Mapping[str, Any]) -> dict[str, str]:
    """The tokenizer that made the tokens, as {digest: name}; empty if nothing says which it was."""
    facts = attributes.get("tokenizer")
    if not isinstance(facts, Mapping) or not isinstance(facts.get("sha256"), str):
        return {}
    return {facts["sha256"]: str(facts.get("name", "unnamed"))}


def copy_attributes(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """A private copy, as it will be read back from the manifest.

    Raises:
        ValueError: a manifest cannot store them.
    """
    try:
        copy: dict[str, Any] = json.loads(json.dumps(dict(attributes)))
        check_attributes(copy)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"attributes must be valid JSON, because the manifest is: {error}.") from None
    return copy


def check_attributes(attributes: Mapping[str, Any]) -> None:
    """Raise `ValueError` for what Python accepts as JSON but other programs do not.

    Python accepts `NaN`, `1e400` as infinity, lone surrogates, a thousand levels of lists. Passing those on, to a file
    or a screen, would fail far from the manifest they came from.
    """
    level: list[Any] = [attributes]
    for _ in range(_MAX_LEVELS):
        level = [part for value in level for part in _parts(value)]
        if not level:
            break
    else:
        raise ValueError(f"more than {_MAX_LEVELS} nested levels of lists and objects")
    json.dumps(attributes, allow_nan=False, ensure_ascii=False).encode()


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()

"""How to interpret raw data: what the user says, in one frozen object, and what a file's name says.

Everything that decides which records come out is in `identity`; how patiently they are fetched is not. Of files, only
names are examined here, so that listing a million of them opens none.
"""

import codecs
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

from penstock.errors import check_choice

Format = Literal["parquet", "jsonl", "csv", "text", "images", "audio", "video", "webdataset", "arrow"]
TextUnit = Literal["file", "line", "separator"]
FieldType = Literal[
    "text", "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64"
]
Missing = Literal["null", "nan"]

FORMATS: tuple[str, ...] = get_args(Format)
_ASCII = bytes(range(128))
_ALL_BYTES = bytes(range(256))
_BEFORE: dict[str, Any] = {
    "header": None,
    "names": None,
    "types": None,
    "null_values": [""],
    "missing": "null",
    "typed_members": False,
}
_SUFFIXES: dict[Format, str] = {
    "parquet": ".parquet .pq",
    "jsonl": ".jsonl .ndjson .json",
    "csv": ".csv .tsv",
    "text": ".txt .text .md",
    "images": ".jpg .jpeg .jfif .png .webp .avif .jp2 .ppm .pgm .gif .bmp .tif .tiff",
    "audio": ".wav .flac .mp3 .ogg .opus .m4a",
    "video": ".mp4 .m4v .mov .mkv .webm .avi",
    "webdataset": ".tar .tgz",
    "arrow": ".arrow .feather .ipc",
}
_FORMAT_OF_SUFFIX = {suffix: kind for kind, suffixes in _SUFFIXES.items() for suffix in suffixes.split()}
COLUMN_OF_FILES = {"images": "image", "audio": "audio", "video": "video"}
"""Formats in which each file is one record and its folder may be its class; and the column it becomes."""
_COMPRESSION_OF_SUFFIX = {
    ".gz": "gzip",
    ".gzip": "gzip",
    ".tgz": "gzip",
    ".zst": "zstd",
    ".zstd": "zstd",
    ".bz2": "bz2",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """How to read sources; the defaults go by the file names.

    >>> SourceOptions(format="text", text_unit="separator", separator="<|endoftext|>").text_unit
    'separator'
    """

    format: Format | None = None
    """Format of all files; by default each file's name says it."""
    columns: tuple[str, ...] | None = None
    """Columns to read; None reads all. Fewer is faster in every format."""
    exact: tuple[str, ...] = ()
    """Columns of JSON lines and Python rows whose objects stay what their own row says. Arrow gives the fields of all
    rows one order, and makes an integer a float if another row has a float there."""
    text_unit: TextUnit = "file"
    """What one document of a text file is: the file, a line, or the text between two separators."""
    separator: str | None = None
    """What separates two documents, for `text_unit="separator"`."""
    encoding: str = "utf-8"
    """Encoding of text and CSV files: UTF-8 or a one-byte encoding such as "latin-1". JSON is always UTF-8."""
    delimiter: str | None = None
    """What separates two CSV fields; by default a tab in files named .tsv, and a comma otherwise."""
    quote: str | None = '"'
    """What encloses CSV fields that contain delimiters; None if quotes are ordinary characters."""
    quoted_newlines: bool = True
    """Whether a quoted CSV field may contain a newline. With False, many workers can read one file."""
    header: bool | None = None
    """Whether the first line of a CSV file names its columns; by default it does, and a file in which it may be data is
    refused. Columns of files without a header are f0, f1, … unless `names` names them."""
    names: tuple[str, ...] | None = None
    """Names of all CSV columns, in order: for files without a header, or, with `header=True`, instead of theirs."""
    types: Mapping[str, FieldType] | Literal["infer"] | None = None
    """Types of CSV columns; "infer" finds numbers and booleans by the first rows. The rest is text."""
    null_values: tuple[str, ...] = ("",)
    """CSV fields that mean a missing value, in columns that have a type. Text is never missing."""
    missing: Missing = "null"
    """What a missing value becomes: "null", a bad row in `prepare`; "nan", in columns of floats (not those of JSON)."""
    typed_members: bool = False
    """Whether members of WebDataset tars become numbers (.cls) and arrays (.npy), dots in their names underscores, and
    the key of a sample a column `key`; otherwise all are bytes, named by their extensions."""
    classes: tuple[str, ...] | None = None
    """Names of all classes of images or sounds in the order of their numbers; None sorts the folders found."""
    batch_bytes: int = 4 << 20
    """Raw data per batch of records. Also how much is requested from a remote store at once."""
    max_record_bytes: int = 1 << 30
    """A longer line, document or file is a bad row; this keeps a decompression bomb out of memory."""
    max_attempts: int = 5
    """Attempts at each remote request before the read fails."""
    timeout_seconds: float = 60.0
    """A remote request that takes longer is considered stalled and is tried again."""
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    """Passed to fsspec: credentials, endpoint, profile. Never stored."""

    def __post_init__(self) -> None:
        check_choice("format", self.format, (None, *FORMATS))
        check_choice("text_unit", self.text_unit, get_args(TextUnit))
        _check_columns(self)
        _check_separator(self)
        object.__setattr__(self, "encoding", _check_encoding(self.encoding))
        _check_csv(self)
        _check_types(self)
        for name in ("batch_bytes", "max_record_bytes", "max_attempts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}; it must be at least 1.")
        if not self.timeout_seconds > 0:
            raise ValueError(f"timeout_seconds={self.timeout_seconds}; it must be positive.")
        if self.max_record_bytes >= 1 << 31:
            raise ValueError(f"max_record_bytes={self.max_record_bytes}; Arrow's readers need less than 2 GiB.")

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that decides the records and their numbers, as JSON."""
        return {
            "format": self.format,
            "columns": None if self.columns is None else list(self.columns),
            "text_unit": self.text_unit,
            "separator": self.separator,
            "encoding": self.encoding,
            "delimiter": self.delimiter,
            "quote": self.quote,
            "quoted_newlines": self.quoted_newlines,
            "classes": None if self.classes is None else list(self.classes),
            "max_record_bytes": self.max_record_bytes,
            **{name: value for name, value in self._newer.items() if value != _BEFORE[name]},
        }

    @property
    def _newer(self) -> dict[str, Any]:
        """Options that older versions lacked; left out if they mean what those versions did, so that their datasets
        can be continued."""
        return {
            "header": self.header,
            "names": None if self.names is None else list(self.names),
            "types": dict(self.types) if isinstance(self.types, Mapping) else self.types,
            "null_values": list(self.null_values),
            "missing": self.missing,
            "typed_members": self.typed_members,
        }


def _check_columns(options: SourceOptions) -> None:
    for name in ("columns", "classes", "names", "null_values"):
        names = getattr(options, name)
        if isinstance(names, str):
            raise TypeError(f"{name}={names!r} is one string; give a tuple, as in ({names!r},).")
        if names is not None:
            for each in names:
                if not isinstance(each, str):
                    raise TypeError(f"{name}: {each!r} is not a string; write {str(each)!r}.")
            if (not names and name != "null_values") or len(set(names)) != len(names):
                raise ValueError(f"{name}={names!r}; give at least one, each once, or None.")
            object.__setattr__(options, name, tuple(names))


def _check_separator(options: SourceOptions) -> None:
    if (options.text_unit == "separator") != bool(options.separator):
        raise ValueError(
            f"text_unit={options.text_unit!r} with separator={options.separator!r}; "
            'give both text_unit="separator" and a non-empty separator, or neither.'
        )


def _check_encoding(encoding: str) -> str:
    """The encoding by its usual name."""
    try:
        encoding = codecs.lookup(encoding).name
        is_bytewise = encoding == "utf-8" or (
            _ASCII.decode(encoding) == _ASCII.decode() and len(_ALL_BYTES.decode(encoding, "replace")) == 256
        )
    except (LookupError, UnicodeError):
        is_bytewise = False
    if not is_bytewise:
        raise ValueError(
            f"encoding={encoding!r} is neither UTF-8 nor a one-byte encoding, so lines cannot be found by their bytes. "
            f"Convert the files first: iconv -f {encoding} -t utf-8."
        )
    return encoding


def _check_csv(options: SourceOptions) -> None:
    for name in ("delimiter", "quote"):
        value = getattr(options, name)
        if value is not None and (len(value) != 1 or not value.isascii() or value in "\r\n"):
            raise ValueError(f"{name}={value!r}; it must be one ASCII character, and not a newline.")
    if options.delimiter is not None and options.delimiter == options.quote:
        raise ValueError(f"delimiter and quote are both {options.quote!r}; they must differ.")


def _check_types(options: SourceOptions) -> None:
    check_choice("missing", options.missing, get_args(Missing))
    check_choice("header", options.header, (None, True, False))
    if isinstance(options.types, Mapping):
        for name, kind in options.types.items():
            check_choice(f"types[{name!r}]", kind, get_args(FieldType))
    else:
        check_choice("types", options.types, (None, "infer"))


def compression_of(path: str) -> str | None:
    """pyarrow's name for the compression of a file called `path`; None if it is not compressed."""
    return _COMPRESSION_OF_SUFFIX.get(_suffix(path))


def format_of(path: str, options: SourceOptions) -> Format | None:
    """Format of the file called `path`; None if its name does not say."""
    if is_object(path):
        return cast(Format, "object")
    return options.format or _format_of_name(path)


def is_data_name(path: str, options: SourceOptions) -> bool:
    """Whether a file found in a folder is data, judging by its name."""
    guessed = _format_of_name(path)
    if options.format in ("text", "webdataset", "jsonl", "csv"):
        return True  # files of these formats have any name, and the user said that this is their format
    return guessed == options.format if options.format else guessed is not None


def is_tab_separated(path: str) -> bool:
    """Whether the name says that it is a TSV file, compressed or not."""
    return _suffix(_without_compression(path)) == ".tsv"


def is_object(path: str) -> bool:
    """Whether `path` refers to an object in this process."""
    return path.startswith("object:")


def _format_of_name(path: str) -> Format | None:
    return _FORMAT_OF_SUFFIX.get(_suffix(path)) or _FORMAT_OF_SUFFIX.get(_suffix(_without_compression(path)))


def _without_compression(path: str) -> str:
    return path[: -len(_suffix(path))] if compression_of(path) else path


def _suffix(path: str) -> str:
    name = path.split("?", 1)[0].split("#", 1)[0] if "://" in path else path  # a signed URL has more after the name
    return posixpath.splitext(name)[1].lower()

"""What the first rows of the files settle, once, before any split is read: types of CSV columns."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from penstock.sources._csv import read_csv
from penstock.sources._csv_types import infer_types
from penstock.sources._formats import format_of
from penstock.sources._model import SourceFile, Split
from penstock.sources._options import FieldType, SourceOptions

# How many files are searched for a first row; an empty file or two is nothing unusual.
_MAX_FILES = 16


def settle_types(files: Sequence[SourceFile], options: SourceOptions) -> SourceOptions:
    """The options with types for `types="infer"`, so that all readers of the files take the same ones."""
    if options.types != "infer":
        return options
    return dataclasses.replace(options, types=types_in_first_rows(files, options))


def types_in_first_rows(files: Sequence[SourceFile], options: SourceOptions) -> dict[str, FieldType]:
    """Columns of CSV files whose first rows hold numbers or truth values, with their types."""
    as_text = dataclasses.replace(options, types=None)
    for file in itertools.islice((file for file in files if format_of(file.path, options) == "csv"), _MAX_FILES):
        whole = Split("csv", file.path, 0, -1, max(file.num_bytes, 0))
        for records in read_csv(whole, as_text):
            if records.num_rows:
                return infer_types(records, options)
    return {}

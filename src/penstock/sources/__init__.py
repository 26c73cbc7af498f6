"""Raw data as splits that can be read independently: parquet, JSONL, CSV, text, images, tars, Arrow, objects.

    list_files -> plan_splits -> read_split, one split at a time, in any process -> Records: columns, for `prepare`
                                 read_rows, from any block on                    -> Rows: dicts, for streams

May import: `errors`, `filesystem`, `identity`. Imported by: `cli`, `preparation`, `pytorch`, `streams`, `transforms`.
Holds state: the objects given as sources, by name.
"""

from penstock.sources._listing import Source, list_files, list_skipped
from penstock.sources._listing_local import changed_since
from penstock.sources._model import Records, RowError, Rows, SourceFile, Split
from penstock.sources._objects import IterableSource
from penstock.sources._options import FORMATS, Format, SourceOptions, TextUnit, format_of, is_data_name
from penstock.sources._reading import (
    peek_split,
    read_rows,
    read_split,
    resolve_types,
    types_in_first_rows,
)
from penstock.sources._splitting import class_names, plan_splits, why_unsplittable
from penstock.sources._urls import PLAIN_SCHEMES, refused_url, without_secrets

__all__ = [
    "FORMATS",
    "PLAIN_SCHEMES",
    "Format",
    "IterableSource",
    "Records",
    "RowError",
    "Rows",
    "Source",
    "SourceFile",
    "SourceOptions",
    "Split",
    "TextUnit",
    "changed_since",
    "class_names",
    "format_of",
    "is_data_name",
    "list_files",
    "list_skipped",
    "peek_split",
    "plan_splits",
    "read_rows",
    "read_split",
    "refused_url",
    "resolve_types",
    "types_in_first_rows",
    "why_unsplittable",
    "without_secrets",
]

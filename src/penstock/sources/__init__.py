"""Raw data as splits that can be read independently: parquet, JSONL, CSV, text, images, tars, Arrow, objects.

    list_files -> plan_splits -> read_split, one split at a time, in any process -> Records: columns, for `prepare`
                                 read_rows, from any block on                    -> Rows: dicts, for streams
    stream: Recipe -> strands: what each part reads -> PartRun: its records, a state after every one    _stream_*

Streams read in order or through a shuffle buffer, each record in exactly one part.

May import: `errors`, `filesystem`, `identity`, `order`, `shapes`, `shards`. Imported by: `cli`, `preparation`,
`pytorch`, `transforms`. Holds state: the objects given as sources, by name.
"""

from penstock.sources._files import read_file
from penstock.sources._listing import changed_since, list_files, list_skipped
from penstock.sources._model import Records, RowError, SourceFile, Split
from penstock.sources._objects import IterableSource
from penstock.sources._options import FORMATS, Format, SourceOptions, TextUnit, is_data_name
from penstock.sources._remote import PLAIN_SCHEMES, refused_url, without_secrets
from penstock.sources._splits import (
    class_names,
    peek_split,
    plan_splits,
    read_rows,
    read_split,
    resolve_types,
    types_in_first_rows,
    why_unsplittable,
)
from penstock.sources._stream_run import PartRun
from penstock.sources._stream_shares import OnError, Recipe, make_recipe
from penstock.sources._stream_state import check_state, join_states, start_state

__all__ = [
    "FORMATS",
    "PLAIN_SCHEMES",
    "Format",
    "IterableSource",
    "OnError",
    "PartRun",
    "Recipe",
    "Records",
    "RowError",
    "SourceFile",
    "SourceOptions",
    "Split",
    "TextUnit",
    "changed_since",
    "check_state",
    "class_names",
    "is_data_name",
    "join_states",
    "list_files",
    "list_skipped",
    "make_recipe",
    "peek_split",
    "plan_splits",
    "read_file",
    "read_rows",
    "read_split",
    "refused_url",
    "resolve_types",
    "start_state",
    "types_in_first_rows",
    "why_unsplittable",
    "without_secrets",
]

"""Samples on disk and in memory: the shard format, its writer, and vectorised reads.

    write:  DatasetWriter -> ShardWriter (buffers, cuts) -> Workspace (all or nothing) -> shards + manifest
    read:   ShardFolder -> gather from maps (in C), or pread -> OpenShards opens and checks what they need
            ArrayStorage: the same reads from RAM, or from a foreign file mapped in place
            open_files: tars and Arrow files where they are, by an index or by their messages
    trace:  provenance-*.json: which file and row each sample came from

Files are validated here: rooms that import this one can trust every count, offset and name.

May import: `errors`, `filesystem`, `identity`, `native`, `schema`. Imported by: `cli`, `dataset`, `plan`,
`preparation`, `service`, `sources`, `tuning`. Holds state: the open shards of this process, weakly, so that a forked
child opens its own; and an index of tars whose folder cannot be written to is kept in the user's cache folder.
"""

from penstock.shards._arrays import (
    ArrayStorage,
    ForeignFormat,
    guess_format,
    megatron_pair,
    open_megatron,
    open_npy,
    open_raw,
    storage_of_arrays,
)
from penstock.shards._arrow import ArrowStorage
from penstock.shards._convert import content_columns, hash_samples, hash_texts
from penstock.shards._folder import Check, ShardFolder
from penstock.shards._foreign import (
    FilesFormat,
    HuggingFaceDataset,
    OnFault,
    find_files,
    guess_files_format,
    index_tars,
    open_files,
    rows_of,
)
from penstock.shards._layout import checksum
from penstock.shards._manifest import (
    MANIFEST_NAME,
    Manifest,
    ShardEntry,
    classes_of,
    is_file_of_a_dataset,
    parse_manifest,
    read_manifest,
    tokenizers_of,
)
from penstock.shards._open_shards import Supply
from penstock.shards._provenance import (
    ORIGIN_COLUMN,
    ORIGIN_SPEC,
    OriginRuns,
    Provenance,
    Runs,
    SplitOrigin,
    origins_from_json,
    origins_to_json,
    pack_provenance,
    read_provenance,
)
from penstock.shards._shard import Io, read_lengths, write_hollow
from penstock.shards._storage import (
    Spans,
    Storage,
    StoredFile,
    column_bytes,
    from_front,
    ranges,
    read_samples,
    samples_per_chunk,
)
from penstock.shards._tar_index import RemoteTars
from penstock.shards._tar_scan import NUMBER_MEMBERS
from penstock.shards._tars import TarStorage
from penstock.shards._verify import DatasetContents, Verification, find_faults, read_contents, verify_folder
from penstock.shards._workspace import Workspace
from penstock.shards._writer import DatasetWriter, ShardWriter, convert_columns

__all__ = [
    "MANIFEST_NAME",
    "NUMBER_MEMBERS",
    "ORIGIN_COLUMN",
    "ORIGIN_SPEC",
    "ArrayStorage",
    "ArrowStorage",
    "Check",
    "DatasetContents",
    "DatasetWriter",
    "FilesFormat",
    "ForeignFormat",
    "HuggingFaceDataset",
    "Io",
    "Manifest",
    "OnFault",
    "OriginRuns",
    "Provenance",
    "RemoteTars",
    "Runs",
    "ShardEntry",
    "ShardFolder",
    "ShardWriter",
    "Spans",
    "SplitOrigin",
    "Storage",
    "StoredFile",
    "Supply",
    "TarStorage",
    "Verification",
    "Workspace",
    "checksum",
    "classes_of",
    "column_bytes",
    "content_columns",
    "convert_columns",
    "find_faults",
    "find_files",
    "from_front",
    "guess_files_format",
    "guess_format",
    "hash_samples",
    "hash_texts",
    "index_tars",
    "is_file_of_a_dataset",
    "megatron_pair",
    "open_files",
    "open_megatron",
    "open_npy",
    "open_raw",
    "origins_from_json",
    "origins_to_json",
    "pack_provenance",
    "parse_manifest",
    "ranges",
    "read_contents",
    "read_lengths",
    "read_manifest",
    "read_provenance",
    "read_samples",
    "rows_of",
    "samples_per_chunk",
    "storage_of_arrays",
    "tokenizers_of",
    "verify_folder",
    "write_hollow",
]

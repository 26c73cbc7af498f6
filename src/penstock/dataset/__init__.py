"""Which samples there are, wherever they are stored: locations, selections, datasets joined without a copy.

    Location      a folder of shards, a foreign file, arrays in memory, or other datasets:       _location
        joined    one after the other, or column beside column                                   _joined
        cut       into windows of series                                                         _unfolded
    Samples       a storage, and the selections that say which of its samples are meant          _samples
        chosen by position, by a column's values, or by a key that follows the sample            _selections, _samples
        read      as columns and single samples; their tokens as one stream                      _samples, _tokens
    ShardLayer    which of its samples each shard holds, through all of these                        _shard_map
    find_earlier  a dataset as it was before samples were appended                               _location
    stage         a verified copy on the node's own storage: all of it, or nothing               _stage, _stage_remote
    push          the same in an object store                                                      _push

`penstock.Dataset` adds the verbs that make plans, so it stands in `plan`, one line up.

May import: `errors`, `filesystem`, `identity`, `order`, `remote`, `report`, `schema`, `shards`. Imported by: `cli`,
`plan`, `preparation`, `tuning`. Holds state: remote datasets are kept on the
node, in its scratch or the user's cache folder.
"""

from penstock.dataset._joined import (
    ConcatStorage,
    check_classes,
    check_concat,
    check_zip,
    foreign_files,
    lasting_attributes,
)
from penstock.dataset._location import (
    ArraysLocation,
    FilesLocation,
    FolderLocation,
    ForeignLocation,
    JoinedLocation,
    Location,
    UnfoldedLocation,
    find_earlier,
    open_store_tars,
)
from penstock.dataset._push import Pushed, check_destination_url, parcel_of, push, put_manifest
from penstock.dataset._remote import RemoteLocation, default_cache, open_folder, open_store_folder, verify
from penstock.dataset._samples import (
    Columns,
    Sample,
    SampleKeys,
    Samples,
    Selection,
    Take,
    as_indices,
    read_columns,
    read_sample,
)
from penstock.dataset._selections import Condition, SplitPart, find_samples, find_true, split_parts
from penstock.dataset._shard_map import ShardLayer, element_layers, sample_layers, shard_edges
from penstock.dataset._stage import Scratch, StorageKind, find_scratch, stage, storage_kind
from penstock.dataset._stage_remote import RemoteManifest, read_remote
from penstock.dataset._tokens import (
    TokenStream,
    check_mask_lengths,
    mask_column,
    mask_stream,
    packed_column,
    token_stream,
    windowed_column,
)

__all__ = [
    "ArraysLocation",
    "Columns",
    "ConcatStorage",
    "Condition",
    "FilesLocation",
    "FolderLocation",
    "ForeignLocation",
    "JoinedLocation",
    "Location",
    "Pushed",
    "RemoteLocation",
    "RemoteManifest",
    "Sample",
    "SampleKeys",
    "Samples",
    "Scratch",
    "Selection",
    "ShardLayer",
    "SplitPart",
    "StorageKind",
    "Take",
    "TokenStream",
    "UnfoldedLocation",
    "as_indices",
    "check_classes",
    "check_concat",
    "check_destination_url",
    "check_mask_lengths",
    "check_zip",
    "default_cache",
    "element_layers",
    "find_earlier",
    "find_samples",
    "find_scratch",
    "find_true",
    "foreign_files",
    "lasting_attributes",
    "mask_column",
    "mask_stream",
    "open_folder",
    "open_store_folder",
    "open_store_tars",
    "packed_column",
    "parcel_of",
    "push",
    "put_manifest",
    "read_columns",
    "read_remote",
    "read_sample",
    "sample_layers",
    "shard_edges",
    "split_parts",
    "stage",
    "storage_kind",
    "token_stream",
    "verify",
    "windowed_column",
]

"""Which samples there are, wherever they are stored: locations, selections, and datasets joined without a copy.

    Location      a folder of shards, a foreign file, arrays in memory, or other datasets:       _location
        joined    one after the other, or column beside column                                   _concatenated, _zipped
                                                                                                 (_joined)
        cut       into windows of series                                                         _unfolded
    Samples       a storage, and the selections that say which of its samples are meant          _samples
        chosen by position, by a column's values, or by a key that follows the sample            _selections, _keys
        read      as columns and single samples; their tokens as one stream                      _samples, _tokens
    find_earlier  a dataset as it was before samples were appended                               _location

May import: `errors`, `identity`, `order`, `schema`, `shards`, `splitmix`. Imported by: `plan`, `rows`. Holds no state.
"""

from penstock.samples._concatenated import ConcatStorage, check_classes, check_concat
from penstock.samples._joined import lasting_attributes
from penstock.samples._keys import SampleKeys
from penstock.samples._location import (
    ArraysLocation,
    FolderLocation,
    ForeignLocation,
    JoinedLocation,
    Location,
    UnfoldedLocation,
    find_earlier,
)
from penstock.samples._samples import Columns, Sample, Samples, Selection, Take, as_indices, read_columns, read_sample
from penstock.samples._selections import Condition, SplitPart, find_samples, find_true, split_parts
from penstock.samples._tokens import (
    TokenStream,
    check_mask_lengths,
    mask_column,
    mask_stream,
    packed_column,
    token_stream,
    windowed_column,
)
from penstock.samples._zipped import check_zip

__all__ = [
    "ArraysLocation",
    "Columns",
    "ConcatStorage",
    "Condition",
    "FolderLocation",
    "ForeignLocation",
    "JoinedLocation",
    "Location",
    "Sample",
    "SampleKeys",
    "Samples",
    "Selection",
    "SplitPart",
    "Take",
    "TokenStream",
    "UnfoldedLocation",
    "as_indices",
    "check_classes",
    "check_concat",
    "check_mask_lengths",
    "check_zip",
    "find_earlier",
    "find_samples",
    "find_true",
    "lasting_attributes",
    "mask_column",
    "mask_stream",
    "packed_column",
    "read_columns",
    "read_sample",
    "split_parts",
    "token_stream",
    "windowed_column",
]

"""What a sample is made of: dtypes, columns, and values of uneven length.

Knows nothing of files.

May import: `errors`. Imported by: `cli`, `dataset`, `loader`, `order`, `packing`, `plan`, `preparation`, `pytorch`,
`service`, `shards`, `transforms`. Holds no state.
"""

from penstock.schema._columns import (
    HASH_COLUMN,
    LABEL_COLUMNS,
    Column,
    Schema,
    array_of_tensor,
    common_dtype,
    dtype_from_name,
    dtype_from_tag,
    dtype_name,
    dtype_tag,
    exact_array,
    name_of_dtype,
)
from penstock.schema._ragged import Ragged, is_byte_strings, join_parts, join_samples, offsets_of, take_samples

__all__ = [
    "HASH_COLUMN",
    "LABEL_COLUMNS",
    "Column",
    "Ragged",
    "Schema",
    "array_of_tensor",
    "common_dtype",
    "dtype_from_name",
    "dtype_from_tag",
    "dtype_name",
    "dtype_tag",
    "exact_array",
    "is_byte_strings",
    "join_parts",
    "join_samples",
    "name_of_dtype",
    "offsets_of",
    "take_samples",
]

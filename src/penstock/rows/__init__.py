"""What row i of an endless run holds: samples, token windows, padded or packed documents, or a mixture of these.

    RowSource          any rows by absolute number: read, trace, account, read-ahead        _rows, _accounts
      which is next    order of an epoch, draws by weight and class                         _epochs, _sample_orders
      SampleRows       each sample                                                          _sample_rows
      PaddedRows       one document each, those of like length together                     _sample_rows
      TokenWindowRows  fixed windows of all tokens                                          _token_window_rows
      PackedRows       whole documents side by side                                         _packed_rows, _pack_cache
      over any of them: several sources, other epochs                                       _mixed_rows, _stretched_rows
    pieces -> arrays   tokens, labels, positions, columns beside them                       _compose, _kernels
    mixing             how far batches are from a full shuffle                              _mixing

May import: `compiled`, `errors`, `identity`, `order`, `packing`, `report`, `samples`, `schema`, `shards`, `stages`.
Imported by: `plan`. Holds state: a packed source keeps the windows it packed last in memory (`_packed_rows`), and row
counts of large datasets are kept in the user's cache folder (`_pack_cache`). Neither changes a batch.
"""

from penstock.rows._accounts import COUNTED_BATCH, DocumentTrace, Ledger, Mixing
from penstock.rows._compose import ROW_TARGETS
from penstock.rows._mixed_rows import Deal, MixedRows, mix_rows
from penstock.rows._pack_cache import find_pack_index
from penstock.rows._packed_rows import PackedRows
from penstock.rows._rows import BatchArrays, OutputArrays, Rows, RowSource
from penstock.rows._sample_orders import make_order
from penstock.rows._sample_rows import PaddedRows, SampleRows, is_cheap_at_random
from penstock.rows._stretched_rows import stretch
from penstock.rows._token_window_rows import TokenWindowRows

__all__ = [
    "COUNTED_BATCH",
    "ROW_TARGETS",
    "BatchArrays",
    "Deal",
    "DocumentTrace",
    "Ledger",
    "MixedRows",
    "Mixing",
    "OutputArrays",
    "PackedRows",
    "PaddedRows",
    "RowSource",
    "Rows",
    "SampleRows",
    "TokenWindowRows",
    "find_pack_index",
    "is_cheap_at_random",
    "make_order",
    "mix_rows",
    "stretch",
]

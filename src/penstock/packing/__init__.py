"""Which documents share a row: best-fit-decreasing packing, counted to the token.

Pure integer arithmetic on lengths. Knows nothing of files, threads or torch.
Its loops are in C.

May import: `native`, `schema`. Imported by: `plan`, `preparation`. Holds no state.
"""

from penstock.packing._index import PackIndex, ReadLengths, build_pack_index, index_name
from penstock.packing._ledger import PackingLedger, make_ledger
from penstock.packing._pack import PACKING_VERSION, Packing, count_rows, pack
from penstock.packing._settings import PackingSettings

__all__ = [
    "PACKING_VERSION",
    "PackIndex",
    "Packing",
    "PackingLedger",
    "PackingSettings",
    "ReadLengths",
    "build_pack_index",
    "count_rows",
    "index_name",
    "make_ledger",
    "pack",
]

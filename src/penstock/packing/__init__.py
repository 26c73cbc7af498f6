"""Which documents share a row: best-fit-decreasing packing, counted to the token.

Pure integer arithmetic on lengths. Knows nothing of files, threads or torch.
Its loops are in C.

May import: `native`, `schema`. Imported by: `plan`, `preparation`. Holds no state.
"""

from penstock.packing._ledger import PackIndex, PackingLedger, ReadLengths, build_pack_index, index_name, make_ledger
from penstock.packing._pack import PACKING_VERSION, Packing, PackingSettings, count_rows, pack

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

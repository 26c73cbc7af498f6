"""The loops of this room, in C: the C files say what each does, and what it may dereference.

Nothing is resolved in Python per sample, and nothing holds the GIL. Memory is fetched ahead, which makes `plan.read` of
32 x 2,048 uint16 to int64 1.4 times as fast. Arrays must lie in one piece.
"""

from penstock.native import ARRAY, INT, kernel

DONE = -1

gather = kernel("shards_gather", ARRAY, ARRAY, INT, ARRAY, INT, ARRAY, ARRAY)
locate = kernel("shards_locate", ARRAY, ARRAY, INT, ARRAY, INT, INT, ARRAY, ARRAY)
measure = kernel("shards_measure", ARRAY, ARRAY, INT, ARRAY, INT, ARRAY)
copy_spans = kernel("shards_copy_spans", ARRAY, ARRAY, ARRAY)
gather_spans = kernel("shards_gather_spans", ARRAY, ARRAY, INT, *[ARRAY] * 4, INT, ARRAY, ARRAY)
gather_stream = kernel("shards_gather_stream", ARRAY, ARRAY, INT, ARRAY, INT, ARRAY, ARRAY)
read_files = kernel("shards_read_files", *[ARRAY] * 5)
hash_spans = kernel("shards_hash_spans", ARRAY, ARRAY, ARRAY)
scan_tar = kernel("shards_scan_tar", INT, INT, *[ARRAY] * 5)

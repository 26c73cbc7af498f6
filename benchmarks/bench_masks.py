"""How long does a block mask take, from reaches and by torch's `create_block_mask`?

Both make the mask of the same packed row (lengths lognormal(6.2, 1.1), as of web text) on the CPU,
turn by turn in one process, and their tensors are compared first. torch's way is left out at 32 k,
where it evaluates 1.1 billion pairs. Times are medians.

    python benchmarks/bench_masks.py [--threads 1] [--rows 1] [--repeats 3]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from _machine import print_result
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from penstock import masks

COMPARED_LENGTHS = (4096, 8192)
OWN_LENGTHS = (32768,)
OWN_CALLS_PER_REPEAT = 20  # ours takes well under a millisecond: too short to time one by one


def packed_ids(num_rows: int, length: int) -> Tensor:
    rng = np.random.default_rng(7)
    rows = np.empty((num_rows, length), dtype=np.int32)
    for row in rows:
        lengths = np.maximum(rng.lognormal(6.2, 1.1, size=length).astype(np.int64), 1)
        row[:] = np.repeat(np.arange(length), lengths)[:length]
    return torch.from_numpy(rows)


def torch_block_mask(ids: Tensor) -> BlockMask:
    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (ids[b, q] == ids[b, k])

    rows, length = ids.shape
    return create_block_mask(mask_mod, rows, None, length, length, device="cpu")


def seconds_per_call(function: Callable[[], object], num_calls: int) -> float:
    start = time.perf_counter()
    for _ in range(num_calls):
        function()
    return (time.perf_counter() - start) / num_calls


def measure(num_rows: int, length: int, repeats: int, *, with_torch: bool) -> dict[str, float]:
    ids = packed_ids(num_rows, length)
    ours, theirs = masks.block_mask({"document_ids": ids}), None
    if with_torch:
        theirs = torch_block_mask(ids)
        pairs = zip(ours.as_tuple(flatten=False), theirs.as_tuple(flatten=False), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor))
    own, other = [], []
    for _ in range(repeats):
        own.append(seconds_per_call(lambda: masks.block_mask({"document_ids": ids}), OWN_CALLS_PER_REPEAT))
        if with_torch:
            other.append(seconds_per_call(lambda: torch_block_mask(ids), 1))
    figures = {"block_mask, ms": statistics.median(own) * 1e3}
    if other:
        figures["create_block_mask, ms"] = statistics.median(other) * 1e3
        figures["ratio"] = statistics.median(other) / statistics.median(own)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    settings = parser.parse_args()
    torch.set_num_threads(settings.threads)
    lengths = [(length, True) for length in COMPARED_LENGTHS] + [(length, False) for length in OWN_LENGTHS]
    figures = {
        f"{length:,} tokens": measure(settings.rows, length, settings.repeats, with_torch=with_torch)
        for length, with_torch in lengths
    }
    print_result("How long does a FlexAttention block mask take?", vars(settings), figures, "torch")


if __name__ == "__main__":
    main()

"""What ranks wait for each other, with rows as they come and dealt by cost; and batches by tokens beside others' ways.

Lengths are those of Python sources and of Debian's documentation (a token for four bytes), and a log-normal like a web
corpus's.

    deal     max/mean attention cost over ranks, before, after, and the best of a long search of random deals; the
             cost of planning a step at the start of the run and at its millionth step
    tokens   padding, spread over ranks and batches of `batch(tokens=...)`, of fairseq's `--max-tokens` and of the
             Trainer's group_by_length and batch_rebalance; and what each repeats and loses when a run goes on with half
             as many ranks
    ddp      a job of 2 and of 4 processes: a small transformer with attention inside documents, both ways in turns

fairseq's way is written anew here from `batch_by_size_fast` (fairseq/data/data_utils_fast.pyx) and `EpochBatchIterator`
(fairseq/data/iterators.py): rows sorted by length, batches of `max_tokens` in multiples of 8 rows, shuffled, every w-th
for a rank; it resumes by the number of batches that each rank took. The Trainer's are transformers' own samplers; it
resumes by the number of steps, with half as many ranks also with twice the gradient accumulation.

    python benchmarks/bench_balance.py [--only deal|tokens|ddp] [--seconds 1]
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from _machine import print_result
from numpy.typing import NDArray

import penstock
from penstock.plan import Plan

Int64 = NDArray[np.int64]
LENGTH, LONGEST = 4096, 8192
FEW = 40_000
"""Rows for a sampler that takes a millisecond a step on each rank."""
WAYS = ((8, 32, 1), (4, 32, 1), (4, 32, 2))
"""(ranks, rows of a rank's batch, such batches in a step) of a Trainer: before, after, and after with larger steps."""


def main() -> None:
    """Print the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["deal", "tokens", "ddp"])
    parser.add_argument("--seconds", type=float, default=1.0, help="of searching for each case of `deal`")
    parser.add_argument("--steps", type=int, default=24, help="of each `ddp` job")
    arguments = parser.parse_args()
    parts = {"deal": deal, "tokens": tokens, "ddp": ddp}
    for name, part in parts.items():
        if arguments.only in (None, name):
            print_result(f"balance: {name}", vars(arguments), part(arguments), "transformers")


def corpora() -> dict[str, Int64]:
    """Lengths of documents in tokens."""
    log_normal = np.exp(np.random.default_rng(0).normal(6.2, 1.1, 400_000)).astype(np.int64) + 1
    found = {"python": sizes_of(Path(os.__file__).parent, "*.py"), "debian docs": sizes_of(Path("/usr/share/doc"), "*")}
    return {name: lengths for name, lengths in {**found, "log-normal": log_normal}.items() if len(lengths) > 1000}


def sizes_of(folder: Path, pattern: str) -> Int64:
    """A token for four bytes of each file; the folder's own packages included, each a hundred times."""
    sizes = [path.stat().st_size for path in folder.rglob(pattern) if path.is_file() and not path.is_symlink()]
    return np.tile(np.array(sizes, np.int64) // 4 + 1, max(1, 400_000 // max(1, len(sizes))))


def documents(lengths: Int64, *, longest: int | None = None) -> Any:
    """A shuffled dataset of documents of these lengths, of tokens at random."""
    shown = lengths if longest is None else np.minimum(lengths, longest)
    shown = np.random.default_rng(1).permutation(shown)[: 300_000_000 // max(1, int(shown.mean()))]
    tokens = np.frombuffer(np.random.default_rng(2).bytes(int(shown.sum())), np.uint8)
    return penstock.from_arrays({"tokens": penstock.Ragged.from_lengths(tokens, shown)})


def deal(arguments: argparse.Namespace) -> dict[str, Any]:
    """Max/mean of attention over ranks."""
    figures: dict[str, Any] = {}
    for name, lengths in corpora().items():
        kinds = {
            "packed": documents(lengths).shuffle(seed=1).pack(LENGTH),
            "single": documents(lengths, longest=LONGEST).shuffle(seed=1).pad(),
        }
        for kind, stages in kinds.items():
            for world_size in (8, 64):
                for rows in (2, 4, 8, 16):
                    plan = stages.batch(world_size * rows, balance="attention")
                    figures[f"{name}, {kind}, {world_size} x {rows}"] = compare(plan, world_size, arguments.seconds)
            if name == "log-normal":
                figures[f"planning, {kind}, 64 x 8"] = planning(stages.batch(512, balance="attention"))
    return figures


def compare(plan: Plan, world_size: int, seconds: float) -> str:
    """Before, after and best of a search, as means over some steps; the worst step's ratio to the search's."""
    found = []
    for step in np.linspace(0, plan.num_batches() - 2, 4).astype(int).tolist():
        row = plan.row_of(step)
        costs = plan.row_source.costs(np.arange(row, row + plan.global_size), "attention")
        shares = [plan._reader.rows_at(row, rank, world_size)[0] - row for rank in range(world_size)]
        mean = costs.sum() / world_size
        before = costs.reshape(-1, world_size).sum(axis=0).max() / mean
        after = max(costs[share].sum() for share in shares) / mean
        found.append((before, after, search(costs, world_size, seconds / 4) / mean))
    before, after, best = np.mean(found, axis=0)
    worst = max(after / best for _, after, best in found)
    return f"{before:.3f} -> {after:.3f}, searched {best:.3f}, at worst {worst:.3f} of it"


def search(costs: NDArray[np.float64], world_size: int, seconds: float) -> float:
    """The least maximum that random deals find, each followed by exchanges at random while they help."""
    rng, best, end = np.random.default_rng(0), np.inf, time.perf_counter() + seconds
    while time.perf_counter() < end:
        places = rng.permutation(len(costs)).reshape(world_size, -1)
        sums, fails = costs[places].sum(axis=1), 0
        while fails < 300 and time.perf_counter() < end:
            top, other = int(sums.argmax()), int(rng.integers(world_size))
            one, two = rng.integers(places.shape[1], size=2)
            less = costs[places[top, one]] - costs[places[other, two]]
            if other != top and less > 0 and sums[other] + less < sums[top]:
                places[top, one], places[other, two] = places[other, two], places[top, one]
                sums[top], sums[other], fails = sums[top] - less, sums[other] + less, 0
            else:
                fails += 1
        best = min(best, float(sums.max()))
    return best


def planning(plan: Plan) -> dict[str, float]:
    """Microseconds for a step's shares of 64 ranks, once windows are packed, as they are to read the step at all."""
    dealer = plan._reader.dealer
    assert dealer is not None
    found = {}
    for name, first in (("first steps", 0), ("from step 1,000,000 on", 1_000_000)):
        taken = []
        for step in range(first, first + 300):
            begun = time.perf_counter()
            dealer._shares(step * plan.global_size, 64)
            taken.append(time.perf_counter() - begun)
        found[f"µs, {name}, median"] = 1e6 * statistics.median(taken[5:])
    return found


def tokens(_: argparse.Namespace) -> dict[str, Any]:
    """Padding and spread of several ways to make batches of documents."""
    figures: dict[str, Any] = {}
    world_size, budget, multiple = 8, 65_536, 8
    for name, lengths in corpora().items():
        stages = documents(lengths, longest=LONGEST).shuffle(seed=1)
        data = stages.as_plan().source.samples
        sizes = data.lengths(data.schema["tokens"])
        whole = budget * world_size
        rows = multiple * world_size
        for bucket, run in ((None, None), (32_768, None), (32_768, whole)):
            sort = {} if bucket is None else {"bucket": bucket, "run": rows, "run_tokens": run}
            plan = stages.pad(**sort).batch(tokens=whole, multiple=rows, tail="drop")
            for balance in (None, "attention"):
                told = f"ours, bucket={bucket}, run_tokens={run}, balance={balance}"
                dealt = stages.pad(**sort).batch(tokens=whole, multiple=rows, tail="drop", balance=balance)
                figures[f"{name}: {told}"] = describe(ours(dealt, sizes, world_size))
        begun = time.perf_counter()
        count = plan.num_batches(1)
        figures[f"{name}: counting {count} batches"] = (
            f"{1e6 * (time.perf_counter() - begun) / len(sizes):.3f} µs a row"
        )
        begun = time.perf_counter()
        stages.pad(bucket=32_768, run=rows, run_tokens=whole).batch(tokens=whole, multiple=rows).read_at(
            10**9 + 7, 0, 8
        )
        figures[f"{name}: first batch of a new plan, at row 1e9"] = f"{1e3 * (time.perf_counter() - begun):.0f} ms"
        figures[f"{name}: resumed with 4 ranks of 8, ours"] = resumed_ours(plan)
        few = sizes[:FEW]
        theirs = {
            "fairseq --max-tokens": (sizes, [fairseq(sizes, budget, 8), fairseq(sizes, budget, 4)]),
            "Trainer, group_by_length": (sizes, [grouped(sizes, *way) for way in WAYS]),
            "Trainer, batch_rebalance": (few, [rebalanced(few, *way) for way in WAYS]),
        }
        for other, (shown, (before, *after)) in theirs.items():
            figures[f"{name}: {other}"] = describe([[shown[share] for share in step] for step in before])
            for number, steps in enumerate(after):
                how = ", batches as large as before" if number else ""
                figures[f"{name}: resumed with 4 ranks of 8{how}, {other}"] = resumed(before, steps, len(shown))
    return figures


Step = list[Int64]
"""Lengths, or numbers, of the rows of each rank."""


def ours(plan: Plan, sizes: Int64, world_size: int) -> list[list[Int64]]:
    """Lengths of the rows of each rank, of up to 300 steps."""
    steps = range(0, plan.num_batches(), max(1, plan.num_batches() // 300))
    order = plan.row_source
    found = []
    for step in steps:
        row = plan.row_of(step)
        shares = [plan._reader.rows_at(row, rank, world_size)[0] for rank in range(world_size)]
        found.append([order.costs(share, "tokens").astype(np.int64) for share in shares])
    return found


def fairseq(sizes: Int64, max_tokens: int, world_size: int) -> list[Step]:
    """Numbers of the rows of each step, in batches by size, as fairseq makes them."""
    rng = np.random.default_rng(1)
    indices = rng.permutation(len(sizes))
    indices = indices[np.argsort(sizes[indices], kind="mergesort")]
    batches, batch, longest = [], [], 0
    for index in indices.tolist():
        size = int(sizes[index])
        longest = max(longest, size)
        if batch and (len(batch) + 1) * longest > max_tokens:
            kept = max(8 * (len(batch) // 8), len(batch) % 8)
            batches.append(batch[:kept])
            batch = batch[kept:]
            longest = max([int(sizes[each]) for each in batch] + [size])
        batch.append(index)
    batches.append(batch)
    order = np.random.default_rng(2).permutation(len(batches)).tolist()
    order += [None] * (-len(order) % world_size)  # a rank without a batch gets a dummy one
    shown = [np.array([] if each is None else batches[each], np.int64) for each in order]
    return [shown[begin : begin + world_size] for begin in range(0, len(shown), world_size)]


def grouped(sizes: Int64, world_size: int, rows: int, accumulation: int) -> list[Step]:
    """Numbers of the rows of each step of the Trainer with group_by_length, whose batches ranks take in turns."""
    import torch
    from transformers.trainer_pt_utils import LengthGroupedSampler

    generator = torch.Generator().manual_seed(1)
    sampler = LengthGroupedSampler(rows * accumulation, lengths=sizes.tolist(), generator=generator)
    shape = (-1, accumulation, world_size, rows)
    found = np.array(list(sampler))
    step = found[: len(found) // (rows * accumulation * world_size) * rows * accumulation * world_size].reshape(shape)
    return [list(each.swapaxes(0, 1).reshape(world_size, -1)) for each in step]


def rebalanced(sizes: Int64, world_size: int, rows: int, accumulation: int) -> list[Step]:
    """The same with batch_rebalance, which gives ranks groups of any number of rows."""
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    size, lengths = rows * accumulation * world_size, sizes.tolist()
    ranks = [
        [np.array(each, np.int64) for each in BatchRebalanceSampler(lengths, size, world_size, accumulation, rank=rank)]
        for rank in range(world_size)
    ]
    taken = range(0, len(ranks[0]), accumulation)
    return [[np.concatenate(rank[first : first + accumulation]) for rank in ranks] for first in taken]


def describe(steps: list[Step]) -> str:
    """Padding, when each rank is as wide as its longest row; spread over ranks of places, and of attention."""
    places = np.array([[len(share) * int(share.max(initial=0)) for share in step] for step in steps], float)
    held = sum(int(share.sum()) for step in steps for share in step)
    attention = np.array([[float((share.astype(float) ** 2).sum()) for share in step] for step in steps])
    spreads = [float((each.max(axis=1) / each.mean(axis=1)).mean()) for each in (places, attention)]
    rows = [sum(map(len, step)) for step in steps]
    return (
        f"{100 * (1 - held / places.sum()):.1f} % padding, max/mean of places {spreads[0]:.2f}, of attention "
        f"{spreads[1]:.2f}; {min(rows)} to {max(rows)} rows, at most {int(places.max()):,} places on a rank"
    )


def resumed(before: list[Step], after: list[Step], num_rows: int) -> str:
    """What comes twice or not at all when the loader skips as many steps as were taken, and has half as many ranks."""
    seen = np.zeros(num_rows, np.int64)
    half = len(before) // 2
    for step in before[:half] + after[half:]:
        for share in step:
            seen[share] += 1
    return f"{int((seen > 1).sum()):,} of {num_rows:,} rows twice, {int((seen == 0).sum()):,} lost"


def resumed_ours(plan: Plan) -> str:
    """Rows that come twice or not at all in an epoch whose second half has half as many ranks."""
    half = plan.num_batches() // 2
    seen = np.zeros(plan.num_rows, np.int64)
    for step in range(plan.num_batches()):
        row, world_size = plan.row_of(step), 8 if step < half else 4
        for rank in range(world_size):
            seen[plan.steps.rows_at(row, rank, world_size)[0]] += 1
    missing = int((seen == 0).sum()) - plan.steps.num_dropped()
    return f"{int((seen > 1).sum()):,} rows twice, {missing:,} rows lost"


def ddp(arguments: argparse.Namespace) -> dict[str, Any]:
    """Jobs of 2 and 4 processes on this machine."""
    import torch.multiprocessing

    figures: dict[str, Any] = {}
    for world_size in (2, 4):
        with torch.multiprocessing.Manager() as manager:
            results = manager.dict()
            torch.multiprocessing.spawn(train, (world_size, arguments.steps, results), nprocs=world_size)
            figures[f"{world_size} processes"] = summarize([results[rank] for rank in range(world_size)])
    return figures


def train(rank: int, world_size: int, num_steps: int, results: Any) -> None:
    """Train two copies of a model in turns, one on rows as they come, one on rows dealt by attention."""
    import torch
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    store = distributed.FileStore(f"/tmp/bench_balance.{os.getppid()}.{world_size}", world_size)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    stages = documents(corpora()["log-normal"][:40_000]).shuffle(seed=3).pack(LENGTH)
    plans = [stages.batch(4 * world_size, balance=balance) for balance in (None, "attention")]
    jobs = []
    for plan in plans:
        torch.manual_seed(0)
        model = DistributedDataParallel(make_model())
        loader = iter(penstock.DataLoader(plan, rank=rank, world_size=world_size, num_workers=0))
        jobs.append((model, torch.optim.SGD(model.parameters(), 0.05), loader, []))
    for _ in range(num_steps):
        for model, optimizer, loader, taken in jobs:
            batch = next(loader)
            distributed.barrier()
            begun, cpu = time.perf_counter(), time.process_time()
            loss = model(batch) / batch["num_targets_global"] * world_size
            loss.backward()
            waiting = time.process_time()
            optimizer.step()
            optimizer.zero_grad()
            distributed.barrier()
            shown = loss.detach().clone()
            seconds = time.perf_counter() - begun
            distributed.all_reduce(shown)
            taken.append((seconds, waiting - cpu, float(shown) / world_size))
    results[rank] = [taken for _, _, _, taken in jobs]
    distributed.destroy_process_group()


def make_model() -> Any:
    """A transformer of two layers, whose attention stays inside documents."""
    import torch
    from torch import nn
    from torch.nn.functional import cross_entropy, scaled_dot_product_attention

    class Layer(nn.Module):
        def __init__(self, size: int = 32) -> None:
            super().__init__()
            self.mixed, self.out, self.norm = nn.Linear(size, 3 * size), nn.Linear(size, size), nn.LayerNorm(size)

        def forward(self, x: Any, borders: list[int]) -> Any:
            parts = self.mixed(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(1, 2, 0, 3)
            found = [
                scaled_dot_product_attention(*parts[:, None, :, begin:end], is_causal=True)[0]
                for begin, end in itertools.pairwise(borders)
            ]
            return x + self.out(torch.cat(found, dim=1).transpose(0, 1).flatten(1))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(256, 32), nn.Linear(32, 256)
            self.layers = nn.ModuleList([Layer(), Layer()])

        def forward(self, batch: Any) -> Any:
            x = self.embed(batch["input_ids"].flatten())
            for layer in self.layers:
                x = layer(x, batch["cu_seqlens"].tolist())
            return cross_entropy(self.head(x), batch["labels"].flatten(), reduction="sum")

    return Model()


def summarize(ranks: list[Any]) -> dict[str, Any]:
    """Of each way, the median step; by the clock, and by the processor time of the rank that takes most."""
    found: dict[str, Any] = {}
    for number, way in enumerate(("as they come", "dealt by attention")):
        clock = statistics.median(step[0] for step in ranks[0][number][2:])
        each = np.array([[step[1] for step in rank[number][2:]] for rank in ranks])
        found |= {
            f"{way}, ms a step": 1e3 * clock,
            f"{way}, CPU of the dearest rank, ms": 1e3 * np.median(each.max(axis=0)),
        }
        found |= {f"{way}, max/mean of CPU": float(np.median(each.max(axis=0) / each.mean(axis=0)))}
    losses = [np.array([step[2] for step in way]) for way in ranks[0]]
    found["losses differ by at most, relatively"] = f"{np.abs(losses[0] / losses[1] - 1).max():.2e}"
    found["first and last loss"] = f"{losses[0][0]:.4f}, {losses[0][-1]:.4f}"
    return found


if __name__ == "__main__":
    main()

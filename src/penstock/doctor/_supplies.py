"""Where batches come from during a turn: the script's own iterator, memory, or a loader rebuilt with a change.

When its turn is over, a supply goes idle once it has prefetched all it may. The next turn begins only then, so that no
supply computes during the turn of another.

A batch is tensors in containers, which are counted, copied and regrouped here. Torch is never imported for that: a
process that has batches of tensors has imported it already.
"""

import copy
import functools
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from penstock.watching import gauge_of

_DEEPEST = 6
_MOST_REPLAYED, _MOST_REPLAYED_BYTES = 8, 256 << 20
_MOST_GATHERED_BYTES = 1 << 29
_PREFETCHING_SECONDS = 0.5
"""How long an iterator gets to prefetch all it may, if its queue cannot be looked at."""


def tensors_of(batch: Any, depth: int = _DEEPEST) -> Iterator[Any]:
    """Every tensor and array in a batch, in order."""
    if hasattr(batch, "shape") and hasattr(batch, "dtype"):
        yield batch
    elif depth and isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_of(value, depth - 1)
    elif depth and isinstance(batch, list | tuple):
        for value in batch[:256]:
            yield from tensors_of(value, depth - 1)
    elif depth and hasattr(batch, "__dict__") and not isinstance(batch, type):
        for value in vars(batch).values():
            yield from tensors_of(value, depth - 1)


def rows_of(batch: Any) -> int:
    """Samples in a batch: the first length of its first tensor; 1 when there is none."""
    first = batch
    for _ in range(_DEEPEST):
        if type(first) not in (list, tuple, dict) or not first:
            break
        first = next(iter(first.values() if type(first) is dict else first))
    if getattr(first, "shape", ()) and hasattr(first, "dtype"):  # as in most batches; called for each one
        return max(1, int(first.shape[0]))
    shape = next((each.shape for each in tensors_of(batch) if len(each.shape)), None)
    return max(1, int(shape[0])) if shape is not None else 1


def bytes_of(batch: Any) -> int:
    """Bytes of its tensors."""
    return sum(int(each.nbytes) for each in tensors_of(batch))


def copy_batch(batch: Any) -> Any:
    """A batch that can be changed without changing the other; pinned memory stays pinned."""
    torch = sys.modules["torch"]
    if isinstance(batch, torch.Tensor):
        copied = _clone(batch)
        return copied.pin_memory() if batch.device.type == "cpu" and batch.is_pinned() else copied
    if type(batch) is dict:
        return {key: copy_batch(value) for key, value in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(copy_batch(value) for value in batch)
    try:
        return copy.deepcopy(batch)
    except Exception:  # noqa: BLE001 - holds a file, a lock, a generator: hand out the same one
        return batch


def _clone(tensor: Any) -> Any:
    """A copy made by one thread: torch's own waits for threads whose cores are busy, measured 20 ms for 256 KB."""
    torch = sys.modules["torch"]
    try:
        return torch.from_numpy(tensor.detach().numpy().copy(order="K"))
    except (TypeError, RuntimeError):  # bfloat16, and tensors on a device
        return tensor.detach().clone()


def tokens_of(batch: Any) -> Any:
    """The tensor that looks like padded token ids: whole numbers in two dimensions; None when there is none."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    whole = (torch.int64, torch.int32, torch.int16)
    found = (each for each in tensors_of(batch) if isinstance(each, torch.Tensor))
    return next((each for each in found if each.ndim == 2 and each.dtype in whole and min(each.shape) > 1), None)


def row_lengths(tokens: Any) -> Any:
    """Length of each row without the padding at its end: the value that most rows end with, if it repeats there."""
    last = tokens[:, -1]
    padding = last.mode().values
    is_token = tokens != padding
    ends_padded = (tokens[:, -1] == padding) & (tokens[:, -2] == padding)
    if int(ends_padded.sum()) * 4 < len(tokens):
        return is_token.new_full((len(tokens),), tokens.shape[1], dtype=last.dtype)
    width = tokens.shape[1]
    trailing = is_token.flip(1).int().cummax(1).values.eq(0).sum(1)
    return width - trailing.clamp(max=width - 1)


def padding_share(batch: Any) -> float | None:
    """Share of a batch of tokens that is padding at the ends of rows; None if it is not a batch of tokens."""
    tokens = tokens_of(batch)
    if tokens is None or tokens.device.type != "cpu":
        return None
    return 1 - float(row_lengths(tokens).sum()) / int(tokens.numel())


def can_regroup(batch: Any) -> bool:
    """Whether its rows can be regrouped: every tensor has a row for each sample, and either no width or the tokens'."""
    tokens = tokens_of(batch)
    if tokens is None:
        return False
    rows, width = tokens.shape
    torch = sys.modules["torch"]
    tensors = list(tensors_of(batch))
    return _is_plain(batch) and all(
        isinstance(each, torch.Tensor) and each.shape[:1] == (rows,) and each.shape[1:] in ((), (width,))
        for each in tensors
    )


def group_by_length(batches: list[Any]) -> list[Any]:
    """The same rows in as many batches, those of similar length together, without the padding that all rows share."""
    torch = sys.modules["torch"]
    lengths = [row_lengths(tokens_of(batch)) for batch in batches]
    sizes = [len(each) for each in lengths]
    widest = max(int(tokens_of(batch).shape[1]) for batch in batches)
    order = torch.cat(lengths).argsort()
    joined_lengths = torch.cat(lengths)
    groups, begin = [], 0
    for size in sizes:
        rows = order[begin : begin + size]
        width = int(joined_lengths[rows].max())
        take = functools.partial(_take_rows, rows=rows, width=widest, kept=width)
        groups.append(_map_together(batches, take))
        begin += size
    shuffle = torch.randperm(len(groups), generator=torch.Generator().manual_seed(0)).tolist()
    return [groups[place] for place in shuffle]


def _take_rows(parts: list[Any], rows: Any, width: int, kept: int) -> Any:
    torch = sys.modules["torch"]
    if parts[0].ndim == 1:
        return torch.cat(parts)[rows]
    fill = [part[0, -1] for part in parts]
    wide = [
        part if part.shape[1] == width else torch.cat([part, value.expand(len(part), width - part.shape[1])], 1)
        for part, value in zip(parts, fill, strict=True)
    ]
    return torch.cat(wide)[rows, :kept].contiguous()


def _is_plain(batch: Any) -> bool:
    if type(batch) in (list, tuple):
        return all(_is_plain(each) for each in batch)
    if type(batch) is dict:
        return all(_is_plain(each) for each in batch.values())
    return hasattr(batch, "shape")


def _map_together(batches: list[Any], function: Callable[[list[Any]], Any]) -> Any:
    """A batch made of what `function` makes of the tensors at each place of all batches."""
    first = batches[0]
    if type(first) is dict:
        return {key: _map_together([batch[key] for batch in batches], function) for key in first}
    if type(first) in (list, tuple):
        return type(first)(_map_together(list(parts), function) for parts in zip(*batches, strict=True))
    return function(batches)


class BatchSupply(Protocol):
    """Gives batches during turns."""

    def take(self) -> Any:
        """The next batch. Raises StopIteration at the end of the epoch."""
        ...

    def num_ready(self) -> float:
        """Batches that are ready; NaN if that cannot be known."""
        ...

    def is_idle(self) -> bool:
        """Whether everything that may be prefetched has been."""
        ...

    def close(self) -> None:
        """Let go of workers."""
        ...


class IteratorSupply:
    """Batches of an iterator of torch's or ours."""

    def __init__(self, iterator: Iterator[Any], loader: Any) -> None:
        self.iterator: Iterator[Any] | None = iterator
        self._plans_loader = loader if loads_plan(loader) else None
        self._gauge = gauge_of(loader, iterator)
        self._taken_at = time.monotonic()

    def take(self) -> Any:
        assert self.iterator is not None
        self._taken_at = time.monotonic()
        return next(self.iterator)

    def num_ready(self) -> float:
        return math.nan if self._gauge is None else self._gauge()[0]

    def is_idle(self) -> bool:
        """Whether prefetching has finished; if the queue cannot be inspected, whether enough time has passed."""
        iterator: Any = self.iterator
        if getattr(iterator, "_num_workers", None) == 0:
            return True
        if self._plans_loader is not None:
            statistics = self._plans_loader.stats()
            return bool(statistics.num_queued >= statistics.prefetch)
        if not hasattr(iterator, "_worker_result_queue") or not hasattr(iterator, "_tasks_outstanding"):
            return time.monotonic() > self._taken_at + _PREFETCHING_SECONDS
        try:
            ready = iterator._worker_result_queue.qsize()
            if iterator._data_queue is not iterator._worker_result_queue:
                ready += iterator._data_queue.qsize()
        except (NotImplementedError, OSError, ValueError):  # no qsize on this system; a queue that is closed
            return True
        return bool(ready >= iterator._tasks_outstanding)

    def close(self) -> None:
        """Drop the iterator: workers end with the last reference."""
        self.iterator = self._gauge = self._plans_loader = None


class Replay:
    """The first batches of a run, kept to be served again: as copies, because scripts change batches in place."""

    def __init__(self) -> None:
        self._kept: list[Any] = []
        self._bytes = 0
        self._num_taken = 0

    @property
    def is_full(self) -> bool:
        """Whether there is no need for more."""
        return len(self._kept) >= _MOST_REPLAYED or self._bytes >= _MOST_REPLAYED_BYTES

    def keep(self, batch: Any) -> None:
        """Keep a copy."""
        self._kept.append(copy_batch(batch))
        self._bytes += bytes_of(batch)

    def take(self) -> Any:
        if not self._kept:
            raise StopIteration
        self._num_taken += 1
        return copy_batch(self._kept[self._num_taken % len(self._kept)])

    def num_ready(self) -> float:
        """NaN: batches are not made during a turn."""
        return math.nan

    def is_idle(self) -> bool:
        return True

    def close(self) -> None:
        """Nothing runs."""


class GroupedSupply:
    """Batches of another supply, regrouped by length: less padding.

    While one group is served, the next is gathered, a batch for each that is taken: loading costs as much as before.
    """

    def __init__(self, supply: BatchSupply, *, num_batches: int) -> None:
        self._supply, self._num_batches = supply, num_batches
        self._gathered: list[Any] = []
        self._ready: deque[Any] = deque()

    @property
    def is_ready(self) -> bool:
        """Whether a group is there."""
        return bool(self._ready)

    def deal(self) -> None:
        """Make a group of what was gathered, off the clock; the first time, gather it."""
        if not self._gathered:
            while len(self._gathered) < self._num_batches and self._gather():
                pass
        full = [batch for batch in self._gathered if rows_of(batch) == rows_of(self._gathered[0])]
        self._ready.extend(group_by_length(full) if full else [])
        self._gathered.clear()

    def take(self) -> Any:
        if not self._ready:
            raise StopIteration
        self._gather()
        return self._ready.popleft()

    def num_ready(self) -> float:
        return self._supply.num_ready()

    def is_idle(self) -> bool:
        return self._supply.is_idle()

    def close(self) -> None:
        """The other supply is not ours to close."""
        self._gathered.clear()
        self._ready.clear()

    def _gather(self) -> bool:
        """Gather one more batch; False if there is none, or no room for it."""
        if self._gathered and len(self._gathered) * bytes_of(self._gathered[0]) >= _MOST_GATHERED_BYTES:
            return False
        try:
            self._gathered.append(self._supply.take())
        except StopIteration:
            return False
        return True


class IndexTap:
    """The indices that an iterator draws, remembered: others may draw the next ones, or read the last ones again."""

    def __init__(self, indices: Iterator[Any], remembered: deque[Any]) -> None:
        self._indices, self.remembered = indices, remembered

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        index = next(self._indices)
        self.remembered.append(index)
        return index


def loads_plan(loader: Any) -> bool:
    """Whether a plan is loaded."""
    return getattr(loader, "_source", None) is not None


def is_ours(loader: Any) -> bool:
    """Whether it is Penstock's, or inherits from Penstock's."""
    return any(each.__module__.startswith("penstock.") for each in type(loader).__mro__)


def num_workers_of(loader: Any) -> int:
    """Its own workers; what a plan's loader shows are torch's, of which it has none."""
    return int(loader._run.num_workers if loads_plan(loader) else loader.num_workers)


def wait_until_idle(is_idle: Callable[[], bool], *, seconds: float) -> None:
    """Wait until `is_idle()`, for at most `seconds`."""
    end = time.monotonic() + seconds
    while not is_idle() and time.monotonic() < end:
        time.sleep(0.005)

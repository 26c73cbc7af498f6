"""What a batch is made of: tensors in containers. Counting, copying, padding and regrouping them.

Torch is never imported here: a process that has batches of tensors has imported it already.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_DEEPEST = 6


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

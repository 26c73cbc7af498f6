"""How an epoch of a torch dataset begins: what torch would have drawn by then, and the sampler's indices.

# NOTE [what torch would have drawn by now]
#   When an epoch begins, torch draws, from the loader's generator or else from the global one:
#     1. for an iterable data pipe, a seed that all ranks share
#     2. the order of the sampler; some samplers draw only when the first index is asked for, and so after 3
#     3. a seed for its workers, unless persistent workers live on, which keep theirs
#   and until the next epoch nothing. So the generators as they were before 1, and whether 3 came, decide the epoch: a
#   state keeps these `draws`, and how many batches were handed over. What an epoch does with them:
#
#     loaded state       generators          draws                        seed of the workers
#     none               as they are         1, 2, 3 unless they live on  drawn, or theirs
#     between epochs     as in the state     1, 2, 3 as the saved run     drawn, or the state's, changed: workers lived
#                                            would have                   on there, and have used up its numbers
#     within an epoch    as in the state     1, 2, 3 as the saved run     the state's, changed likewise, unless they
#                                            had; then skips `position`   read again what was handed over; or theirs
#
#   The global generators are the user's. A state sets them only while the sampler starts; where they are between
#   epochs as in the state anyway, the sampler draws from them as in torch, and they move on.
#
# No sample is read for any of that. A sampler with a `state_dict` of its own is asked instead of skipped.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterDataPipe,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import _InfiniteConstantSampler

from penstock.errors import StateError
from penstock.pytorch._torch_datasets import draw_shared_seed, has_state, preserve_generators
from penstock.shapes import Either, find_mismatch

_DRAW_NOTHING = (SequentialSampler, DistributedSampler, _InfiniteConstantSampler, list, tuple, range)
_DRAW_FROM_TORCH = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_WORD = range(1 << 32)
_GENERATORS = {
    "torch": str,
    "numpy": (frozenset({"MT19937"}), (_WORD,) * 624, range(625), range(2), float),
    "python": (range(3, 4), [_WORD], Either(None, float)),
}
"""The global generators in a state, where the sampler draws from them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochStart:
    """How an epoch begins; see NOTE [what torch would have drawn by now]."""

    draws: dict[str, Any]
    """The generators before anything is drawn, and as "seed" whether a seed for workers is."""
    is_restored: bool = False
    """Whether the generators are set to these first; otherwise they stand there."""
    rest_of: dict[str, Any] | None = None
    """The state within the epoch of which this is the rest."""
    worker_seed: int | None = None
    """The seed of the workers; None if it is the one that is drawn."""

    @classmethod
    def find(cls, loader: Any, saved: dict[str, Any] | None, living_seed: int | None) -> EpochStart:
        """How this loader's next epoch begins, after a loaded state or none; workers that live on have their seed."""
        if saved is not None and saved["position"] is not None:
            seed = _resumed_seed(saved) if living_seed is None else living_seed
            return cls(draws=saved["draws"], is_restored=True, rest_of=saved, worker_seed=seed)
        draws_seed, worker_seed = living_seed is None, living_seed
        if saved is not None and not saved["draws"]["seed"]:
            draws_seed = False
            worker_seed = _later_seed(saved["base_seed"], 1) if living_seed is None else living_seed
        draws = current_draws(loader, at_rest=saved is not None) | {"seed": draws_seed}
        if saved is None or _same_generators(saved["draws"], draws):
            return cls(draws=draws, worker_seed=worker_seed)
        draws |= {name: saved["draws"][name] for name in _GENERATORS if name in saved["draws"]}
        return cls(draws=draws, is_restored=True, worker_seed=worker_seed)


class Indices:
    """The indices of one epoch, one batch at a time. It refers to the sampler only: the loader refers to its loop."""

    def __init__(self, loader: Any, start: EpochStart) -> None:
        self.start = start
        rest = start.rest_of
        self.any_index = [None] * loader.batch_size if loader._auto_collation and loader.batch_size else None
        """The index that every batch of an iterable dataset is fetched with."""
        self.handed_over: dict[int, Any] = dict.fromkeys(() if rest is None else rest.get("ahead", ()))
        """Batches that were handed over out of order before, with the sampler's state after each once it is known."""
        self.shared_seed: int | None = None
        self._number: int = 0 if rest is None else rest["position"]
        self._drawn_early: list[Any] = []
        with _restored_generators(loader, start.draws) if start.is_restored else contextlib.nullcontext():
            drawn_seed = self._start(loader) if rest is None else self._return_to(loader, rest)
            if start.is_restored and rest is None:
                self.draw_early()
        self.worker_seed = drawn_seed if start.worker_seed is None else start.worker_seed

    def next(self) -> tuple[int, Any, Any]:
        """(number, index, the sampler's own state after it, if it has one) of the next batch that was not handed over.

        Raises StopIteration at the end.
        """
        drawn = self._draw()
        while self._number in self.handed_over:  # at once: the loop forgets them when it has handed over this one
            number, _, self.handed_over[number] = self._draw()
        return drawn

    def draw_early(self) -> None:
        """Draw one index now, so that a sampler that draws when first asked uses the generators as they are."""
        if not self._drawn_early:
            self._drawn_early = list(itertools.islice(self._iterator, 1))

    def _draw(self) -> tuple[int, Any, Any]:
        index = self._drawn_early.pop() if self._drawn_early else next(self._iterator)
        self._number += 1
        state = None if self._stateful is None else copy.deepcopy(self._stateful.state_dict())
        return self._number - 1, index, state

    def _start(self, loader: Any) -> int | None:
        """Draw what torch draws, in its order; returns the seed for workers, if there is to be one."""
        if isinstance(loader.dataset, IterDataPipe):
            self.shared_seed = draw_shared_seed(loader.generator)
        self._iterator = iter(loader._index_sampler)
        self._stateful = self._iterator if has_state(self._iterator) else stateful_sampler(loader)
        return _draw_seed(loader.generator) if self.start.draws["seed"] else None

    def _return_to(self, loader: Any, rest: dict[str, Any]) -> int | None:
        """Start, and go to where the state stands."""
        sampler, own = innermost_sampler(loader), rest["sampler_state"]
        if rest["sampler_epoch"] is not None and hasattr(sampler, "set_epoch"):
            sampler.set_epoch(rest["sampler_epoch"])
        stateful = stateful_sampler(loader)
        if own is not None and stateful is not None:
            stateful.load_state_dict(own)
        drawn_seed = self._start(loader)
        if own is None:
            if not isinstance(sampler, _InfiniteConstantSampler):  # which always gives the same
                self._skip(rest["position"])
        elif self._stateful is None:
            raise StateError("The state was saved with a sampler that has a state of its own; this one has none.")
        elif self._stateful is not stateful:
            self._stateful.load_state_dict(own)
        return drawn_seed

    def _skip(self, num_batches: int) -> None:
        num_skipped = sum(1 for _ in itertools.islice(self._iterator, num_batches))
        if num_skipped < num_batches:
            raise StateError(
                f"The state stands at batch {num_batches:,} of the epoch; the sampler gives {num_skipped:,}. "
                "It is not the sampler, or not the data, that the state was saved with."
            )
        self.draw_early()


def _draw_seed(generator: torch.Generator | None) -> int:
    """The seed that workers derive theirs from; one draw, as torch draws it."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def _later_seed(base_seed: int, position: int) -> int:
    """A seed for workers that continue where others have used up the numbers of this one."""
    return (base_seed + position * 0x9E3779B97F4A7C15) % (1 << 63)


def innermost_sampler(loader: Any) -> Any:
    """The sampler that decides the order, not the one that only cuts it into batches."""
    sampler = loader._index_sampler
    return sampler.sampler if isinstance(sampler, BatchSampler) and hasattr(sampler, "sampler") else sampler


def stateful_sampler(loader: Any) -> Any:
    """The sampler that has a state of its own, if one has."""
    for sampler in (loader._index_sampler, innermost_sampler(loader)):
        if has_state(sampler):
            return sampler
    return None


def epoch_of(owner: Any) -> int | None:
    """The epoch that a sampler or a dataset was set to, or begins next, if it counts epochs."""
    epoch = getattr(owner, "epoch", None)
    return epoch if type(epoch) is int else None


def current_draws(loader: Any, *, at_rest: bool) -> dict[str, Any]:
    """The generators that this loader's sampler draws from, as they are now; at rest, also that of the next seed."""
    draws: dict[str, Any] = {"generators": [_encode(generator.get_state()) for generator in _generators(loader)]}
    if at_rest and loader.generator is None and loader.num_workers:
        draws["torch"] = _encode(torch.get_rng_state())
    sampler = innermost_sampler(loader)
    if type(sampler) in _DRAW_NOTHING:
        return draws
    if type(sampler) not in _DRAW_FROM_TORCH:  # a sampler of the user's: it may draw from anything
        name, keys, *rest = np.random.get_state(legacy=True)
        draws["numpy"] = [name, np.asarray(keys).tolist(), *rest]
        version, numbers, gauss = random.getstate()
        draws["python"] = [version, list(numbers), gauss]
    if getattr(sampler, "generator", None) is None:
        draws["torch"] = _encode(torch.get_rng_state())
    return draws


def _same_generators(saved: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether the global generators that the sampler draws from are where they were."""
    return all(saved[name] == now.get(name) for name in _GENERATORS if name in saved)


def restore_generators(loader: Any, draws: dict[str, Any]) -> None:
    """Set the generators that were given to the loader or its sampler."""
    for generator, state in zip(_generators(loader), draws["generators"], strict=True):
        generator.set_state(_decode(state))


def check_draws(loader: Any, draws: dict[str, Any]) -> None:
    """Raise `StateError` unless the generators can be set as a state has it; nothing is set.

    numpy accepts any position that it is given, and would read memory behind its numbers.
    """
    wrong = find_mismatch(
        draws, {"generators": [str], **{key: _GENERATORS[key] for key in _GENERATORS if key in draws}}, "draws"
    )
    if wrong:
        raise StateError(f"The state is damaged: {wrong}. Go on from another one.")
    generators, saved = _generators(loader), draws["generators"]
    if len(generators) != len(saved):
        raise StateError(
            f"The state was saved with {len(saved)} generators given to the loader and its sampler; "
            f"here there are {len(generators)}, so the order of the data would differ."
        )
    try:
        for generator, state in zip(generators, saved, strict=True):
            torch.Generator(device=generator.device).set_state(_decode(state))
        if "torch" in draws:
            torch.Generator().set_state(_decode(draws["torch"]))
        if "numpy" in draws:
            np.random.RandomState().set_state(tuple(draws["numpy"]))
        if "python" in draws:
            random.Random().setstate(_python_state(draws["python"]))  # noqa: S311
    except (TypeError, ValueError, RuntimeError) as error:
        raise StateError(
            f"The state is damaged: no generator can be set to it ({error}). Go on from another one."
        ) from error


@contextmanager
def _restored_generators(loader: Any, draws: dict[str, Any]) -> Iterator[None]:
    """All generators as they were then; the global ones, which are the user's, only inside the block."""
    restore_generators(loader, draws)
    with preserve_generators():
        if "torch" in draws:
            torch.set_rng_state(_decode(draws["torch"]))
        if "numpy" in draws:
            np.random.set_state(tuple(draws["numpy"]))
        if "python" in draws:
            random.setstate(_python_state(draws["python"]))
        yield


def _generators(loader: Any) -> list[torch.Generator]:
    found: list[torch.Generator] = []
    for owner in (loader, loader._index_sampler, innermost_sampler(loader)):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and not any(generator is known for known in found):
            found.append(generator)
    return found


def _resumed_seed(saved: dict[str, Any]) -> int:
    """Seed of workers that start in mid-epoch: not the one they began the epoch with, whose numbers are used up.

    Workers that read again what was handed over do get that one.
    """
    base_seed: int = saved["base_seed"]
    if any(isinstance(state, int) for state in saved.get("workers", ())):
        return base_seed
    return _later_seed(base_seed, saved["position"])


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _python_state(saved: list[Any]) -> tuple[Any, ...]:
    version, numbers, gauss = saved
    return version, tuple(numbers), gauss


def _decode(state: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8)

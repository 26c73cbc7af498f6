"""`penstock.stream`: an `IterableDataset` over files that are read as they are, split over ranks and workers.

Which part of the files a process reads is asked when it hands out its first record, from torch's worker
information and the rank. What it reads, and how it goes on, is `penstock.sources`.

# NOTE [which epoch a worker begins]
#   A loader copies its dataset into workers: an epoch set in the training process would not reach workers that live
#   on, and one counted in workers would be lost with them. So the epoch that each worker begins next is in memory that
#   all copies of the dataset share: an anonymous memory file, nothing in /dev/shm. Forked workers inherit it. A worker
#   that unpickles its dataset opens it through /proc, provided that the process that pickled it is one of its
#   ancestors; any other copy counts on its own. Without /proc, so does every copy that is not forked, and a warning
#   says so.
"""

from __future__ import annotations

import itertools
import mmap
import os
import secrets
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from penstock.errors import StateError, first_few, printable
from penstock.machine import read_process
from penstock.pytorch._ranks import find_rank
from penstock.pytorch._warnings import warn_of_second_split, warn_of_separate_epochs
from penstock.sources import (
    Format,
    OnError,
    PartRun,
    Recipe,
    SourceOptions,
    TextUnit,
    check_state,
    join_states,
    make_recipe,
    start_state,
    why_unsplittable,
)
from penstock.workers import create_shared_memory

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
Record = dict[str, Any]

_MOST_WORKERS = 2048
_USER, _HAS_WARNED, _FIRST_WORKER = range(3)
_NUM_BYTES = 8 * (_FIRST_WORKER + _MOST_WORKERS)
_NO_FILE = -1  # where memory has no descriptor: forks share an anonymous map all the same


class Stream(IterableDataset[Any]):
    """Records of files in one pass per epoch; `penstock.stream` makes it.

    Each `iter()` is the next epoch, in every worker, unless `set_epoch` or `load_state_dict` says where to go.
    """

    def __init__(
        self, recipe: Recipe, *, transform: Callable[[Record], Any] | None, rank: tuple[int, int] | None
    ) -> None:
        self._recipe = recipe
        self._transform = transform
        self._rank = rank
        self._epochs = SharedEpochs()
        self._run: PartRun | None = None
        self._owner = os.getpid()
        self._loaded: dict[str, Any] | None = None
        self._is_left_alone = False

    @property
    def splits_over_ranks(self) -> bool:
        """Whether it gives each rank its share, so that nothing else may split it."""
        return self._rank is None

    def leave_alone(self) -> None:
        """Note that nothing will split it again: a loader made sure of that."""
        self._is_left_alone = True

    def __iter__(self) -> Iterator[Any]:
        """Records of this process's part: from a state that was loaded, or from the start of the next epoch."""
        self._run = None  # of the iterator before: this one has handed out nothing
        records = itertools.chain.from_iterable(self._runs())
        transform = self._transform
        return records if transform is None else (transform(record) for record in records)

    def state_dict(self) -> dict[str, Any]:
        """What the latest iterator of this process has handed out, as plain data of about half a KB.

        Raises:
            StateError: the records are read in workers, which alone know.
        """
        info = get_worker_info()
        if (due := self._due_state(0 if info is None else info.id)) is not None:
            return dict(due)
        if info is None and self._epochs.is_used_elsewhere:
            raise StateError(
                "This stream is read by the workers of a loader, so it does not know where they are. Ask a loader that "
                "collects their states: penstock.DataLoader(stream, ...).state_dict()."
            )
        if self._run is not None and self._owner == os.getpid():
            return self._run.state()
        return start_state(self._recipe, self._epochs.next_epoch(0 if info is None else info.id))

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Go on where a state stands, at the next record that is asked for; a running iterator goes there too.

        With another number of ranks or workers, give the states of all of them as a list.

        Raises:
            StateError: the state is of other files or settings; the message says what differs. One that lacks parts
                which are needed is refused when iteration begins.
        """
        state = self._loaded = check_state(state, self._recipe)
        if self._run is not None:
            self._run.stop()
            self._run = None
        info = get_worker_info()
        self._epochs.set_next(state["epoch"], worker=None if info is None else info.id)

    def join_states(self, states: Sequence[dict[str, Any]], num_workers: int) -> dict[str, Any]:
        """One state of those that the workers of this process have; a worker that has not begun has what was loaded."""
        parts, num_parts = self._parts(num_workers)
        own = [each for each in states if each["num_parts"] == num_parts]
        return join_states(own, parts) if own else states[0]

    def is_continued(self, state: dict[str, Any], num_workers: int) -> bool:
        """Whether as many workers go on with a state's own parts."""
        parts, num_parts = self._parts(num_workers)
        return state["num_parts"] == num_parts and {each[0] for each in state["at"]} >= set(parts)

    def read_states(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Those of several workers or ranks as one, in the present form.

        Raises:
            StateError: they are not of this stream, or do not go together.
        """
        return check_state(states, self._recipe)

    @property
    def epoch(self) -> int:
        """The epoch that the next `iter()` in this process, or in worker 0, begins."""
        return self._epochs.next_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Have the next `iter()` begin this epoch, also in workers that run already.

        A state loaded for the same epoch stays loaded.
        """
        if type(epoch) is not int or epoch < 0:
            raise ValueError(f"set_epoch({epoch!r}): epochs count from 0.")
        self._loaded = self._due_state(0)
        self._epochs.set_next(epoch)

    def __getstate__(self) -> dict[str, Any]:
        # A worker that is not forked cannot ask for the rank: there is no process group in it.
        rank = find_rank()
        found = rank if self._rank is None and rank[1] > 1 else self._rank
        return {**self.__dict__, "_rank": found, "_run": None}

    def _due_state(self, worker: int) -> dict[str, Any] | None:
        """The state that this worker continues from; one that was loaded before workers began is used once by each."""
        is_due = self._loaded is not None and self._loaded["epoch"] == self._epochs.next_epoch(worker)
        return self._loaded if is_due else None

    def _runs(self) -> Iterator[PartRun]:
        """The run of this iterator, and each time a state was loaded, the one that continues from it."""
        yield self._begin()
        while self._loaded is not None:
            yield self._begin()

    def _parts(self, num_workers: int) -> tuple[range, int]:
        """Those of this rank's workers, and how many there are in all."""
        rank, world_size = self._rank or find_rank()
        return range(rank * num_workers, (rank + 1) * num_workers), world_size * num_workers

    def _begin(self) -> PartRun:
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        parts, num_parts = self._parts(num_workers)
        part = parts[worker]
        if num_parts > num_workers and self.splits_over_ranks and not self._is_left_alone:
            warn_of_second_split()
        epoch, state = self._epochs.next_epoch(worker), self._due_state(worker)
        self._run = PartRun(self._recipe, part=part, num_parts=num_parts, epoch=epoch, state=state)
        self._owner, self._loaded = os.getpid(), None
        self._epochs.begin(worker, epoch)
        if part == 0 and self._epochs.may_warn():
            _warn_of_whole_files(self._recipe, num_parts)
        return self._run


def stream(
    paths: Paths,
    *,
    format: Format | None = None,
    columns: Sequence[str] | None = None,
    text_unit: TextUnit | None = None,
    shuffle_buffer: int = 0,
    seed: int = 0,
    transform: Callable[[Record], Any] | None = None,
    on_error: OnError = "raise",
    rank: int | None = None,
    world_size: int | None = None,
    reading: SourceOptions | None = None,
) -> Stream:
    """An `IterableDataset` over CSV, TSV, JSONL, text or parquet files, as they are.

    Nothing is read before the first record is asked for, and nothing is counted. With several ranks or workers, each
    reads its own bytes or row groups, and every record comes exactly once. Files that cannot be read from the middle
    (compressed ones, CSV whose quoted fields may hold newlines) are split file by file.

    Args:
        paths: A path, glob, folder or URL, or a list of them.
        format: "csv", "jsonl", "text" or "parquet", where the names do not say.
        columns: Which fields a record has; None is all.
        text_unit: What is a record of text: "line" (default), "separator" (with `reading`'s), or "file".
        shuffle_buffer: Records to draw the next one from; 0 keeps the order of the files.
        seed: Decides the shuffle, together with the epoch.
        transform: Called with each record; what it returns is handed out instead.
        on_error: "raise" stops at a bad record, "skip" leaves bad records out, counts and logs them.
        rank, world_size: This training process among all; by default from torch.distributed, torchrun or Slurm.
        reading: How files are read: delimiter, quotes, encoding, credentials.

    Raises:
        FileNotFoundError: a path matches nothing.
        ValueError: a file has a format that cannot be streamed, or a choice does not exist.

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "numbers.jsonl"
    >>> _ = path.write_text('{"n": 1}\\n{"n": 2}\\n{"n": 3}\\n')
    >>> numbers = stream(path)
    >>> [record["n"] for record in numbers]
    [1, 2, 3]
    """
    if (rank is None) != (world_size is None):
        raise ValueError("Give both rank and world_size, or neither.")
    if rank is not None and world_size is not None and not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} of world_size={world_size}; ranks count from 0.")
    recipe = make_recipe(
        paths,
        format=format,
        columns=columns,
        text_unit=text_unit,
        reading=reading,
        shuffle_buffer=shuffle_buffer,
        seed=seed,
        on_error=on_error,
    )
    given = None if rank is None or world_size is None else (rank, world_size)
    return Stream(recipe, transform=transform, rank=given)


def _warn_of_whole_files(recipe: Recipe, num_parts: int) -> None:
    """Warn that some files are read whole, if that leaves parts without work."""
    reasons = {file.path: why_unsplittable(file, recipe.options) for file in recipe.files}
    whole = [path for path, reason in reasons.items() if reason]
    if not whole or len(whole) >= num_parts or num_parts == 1:
        return
    examples = first_few([f"{printable(path)} {reasons[path]}" for path in whole], 3)
    warnings.warn(
        f"{len(whole)} of {len(recipe.files)} files must be read from their start, each by one worker of one rank, and "
        f"there are {num_parts} of those: some get none of them ({examples}). Use fewer workers or more files; for CSV "
        "whose fields hold no newlines pass reading=penstock.SourceOptions(quoted_newlines=False).",
        stacklevel=4,
    )


class SharedEpochs:
    """For each worker the epoch that is next, and who began one last; see NOTE [which epoch a worker begins]."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = _create() if descriptor is None else descriptor
        if self._descriptor != _NO_FILE:
            weakref.finalize(
                self, os.close, self._descriptor
            )  # not `__del__`: at the end of a process `os` may be gone
        self._numbers = memoryview(mmap.mmap(self._descriptor, _NUM_BYTES)).cast("q")

    def next_epoch(self, worker: int) -> int:
        """The epoch that this worker begins next."""
        return self._numbers[_FIRST_WORKER + worker]

    def begin(self, worker: int, epoch: int) -> None:
        """This worker, in this process, begins an epoch; the one after it is next."""
        self.set_next(epoch + 1, worker)
        self._numbers[_USER] = os.getpid()

    def set_next(self, epoch: int, worker: int | None = None) -> None:
        """This worker, or every one, begins this epoch next."""
        for each in range(_MOST_WORKERS) if worker is None else (worker,):
            self._numbers[_FIRST_WORKER + each] = epoch

    @property
    def is_used_elsewhere(self) -> bool:
        """Whether the last process that began an epoch is another one."""
        return self._numbers[_USER] not in (0, os.getpid())

    def may_warn(self) -> bool:
        """True once, in all processes together."""
        has_warned, self._numbers[_HAS_WARNED] = self._numbers[_HAS_WARNED], 1
        return not has_warned

    def __reduce__(self) -> tuple[Callable[..., SharedEpochs], tuple[int, int, str, int]]:
        try:
            name = os.readlink(f"/proc/self/fd/{self._descriptor}")
        except OSError:
            name = ""
            warn_of_separate_epochs()
        return _restore, (os.getpid(), self._descriptor, name, self.next_epoch(0))


def _create() -> int:
    try:
        return create_shared_memory(f"penstock-epochs-{secrets.token_hex(8)}", _NUM_BYTES)
    except OSError:
        return _NO_FILE


def _restore(owner: int, descriptor: int, name: str, epoch: int) -> SharedEpochs:
    """The same numbers in a descendant of the process that pickled them, else a copy."""
    path = f"/proc/{owner}/fd/{descriptor}"
    try:
        if name and _is_ancestor(owner) and os.readlink(path) == name:
            return SharedEpochs(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError:  # the owner closed it, or belongs to another user
        pass
    epochs = SharedEpochs()
    epochs.set_next(epoch)
    return epochs


def _is_ancestor(process: int) -> bool:
    parent = os.getppid()
    while parent > 1 and parent != process:
        usage = read_process(parent)
        if usage is None:
            return False
        parent = usage.parent
    return parent == process

"""What happens in and to the workers of a torch dataset."""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import get_worker_info

import penstock
from penstock.errors import WorkerDied
from pytorch.examples import children, open_descriptors
from pytorch.torch_examples import (
    Failing,
    Killing,
    Numbers,
    Repeated,
    Slow,
    Split,
    StatefulIterator,
    WhereAmI,
    assert_same,
    both,
    plain,
)
from waiting import wait_until


def workers_of(batches: Any) -> list[int]:
    return [batch[0, 1].item() for batch in batches]


def test_batch_k_is_computed_by_worker_k_mod_n() -> None:
    pids = workers_of(penstock.DataLoader(WhereAmI(), batch_size=2, num_workers=2))
    assert len(set(pids)) == 2
    assert pids == [pids[k % 2] for k in range(10)]
    assert os.getpid() not in pids


def test_without_workers_everything_happens_here_and_objects_are_the_datasets_own() -> None:
    sample = object()
    assert workers_of(penstock.DataLoader(WhereAmI(2), batch_size=2)) == [os.getpid()]
    assert next(iter(penstock.DataLoader([sample], batch_size=None))) is sample


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_start_anew_each_epoch_unless_they_are_persistent(persistent: bool) -> None:
    loader = penstock.DataLoader(WhereAmI(), batch_size=8, num_workers=2, persistent_workers=persistent)
    first, second = workers_of(loader), workers_of(loader)
    assert (first == second) == persistent


@pytest.fixture
def two_torch_threads() -> Iterator[None]:
    """In this process, so that one in a worker is the worker's own."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def test_the_worker_info_says_what_torchs_says(two_torch_threads: None) -> None:
    class Info(Numbers):
        tag = "mine"

        def __getitem__(self, index: int) -> Any:
            info = get_worker_info()
            assert info is not None
            return (
                info.id,
                info.num_workers,
                info.seed,
                info.dataset.tag,
                info.dataset is self,
                torch.initial_seed() == info.seed,
                torch.get_num_threads(),
            )

    assert_same(*both(lambda loader: list(loader(Info(), batch_size=None, num_workers=2))))
    assert get_worker_info() is None


def test_worker_init_fn_runs_after_seeding_and_before_the_first_sample() -> None:
    class Configured(Numbers):
        offset = 0

        def __getitem__(self, index: int) -> Any:
            return self.offset + index, np.random.rand()

    def configure(worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        info.dataset.offset = 100 * (worker + 1)
        np.random.seed(random.randrange(1000) + worker)

    assert_same(*both(lambda loader: list(loader(Configured(), num_workers=2, worker_init_fn=configure))))


def test_an_error_of_worker_init_fn_comes_with_every_batch_of_that_worker() -> None:
    def fail(worker: int) -> None:
        if worker == 1:
            raise ValueError("no such file")

    batches = iter(penstock.DataLoader(Numbers(4), num_workers=2, worker_init_fn=fail))
    assert next(batches).tolist() == [0]
    message = r"Caught ValueError in DataLoader worker process 1.\nOriginal Traceback"
    with pytest.raises(ValueError, match=message):
        next(batches)
    assert next(batches).tolist() == [2]
    with pytest.raises(ValueError, match=message):
        next(batches)


def test_processes_that_a_dataset_starts_can_be_terminated() -> None:
    class Pooled(Numbers):
        def __getitem__(self, index: int) -> Any:
            with multiprocessing.get_context("fork").Pool(1) as pool:
                return pool.map(abs, [-index])[0]

    assert plain(penstock.DataLoader(Pooled(2), num_workers=1)) == [[0], [1]]


def test_an_iterable_dataset_that_cannot_begin_says_so_with_every_batch() -> None:
    class Closed(Repeated):
        def __iter__(self) -> Any:
            raise FileNotFoundError("gone")

    batches = iter(penstock.DataLoader(Closed(), num_workers=1))
    for _ in range(2):
        with pytest.raises(FileNotFoundError, match="gone"):
            next(batches)


class NeedsTwo(Exception):
    """Cannot be made from a message."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(one, two)


@pytest.mark.parametrize(
    "error", [lambda: ValueError("bad sample"), lambda: KeyError("k"), lambda: NeedsTwo(1, 2), lambda: StopIteration()]
)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_errors_have_the_type_and_the_message_that_torch_gives_them(error: Any, num_workers: int) -> None:
    def fail(loader_class: Any) -> Any:
        batches = iter(loader_class(Failing(error), batch_size=3, num_workers=num_workers))
        seen: list[Any] = []
        try:
            seen.extend(next(batches).tolist() for _ in range(2))
            next(batches)
        except Exception as raised:
            seen += [type(raised), str(raised).splitlines()[:1]]
        return seen

    ours, torchs = both(fail)
    assert ours == torchs


def test_an_error_names_the_samples_and_the_loop_goes_on_after_it() -> None:
    batches = iter(penstock.DataLoader(Failing(lambda: OSError("disk")), batch_size=3, num_workers=2))
    assert plain([next(batches), next(batches)]) == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(OSError, match="in __getitem__") as caught:
        next(batches)
    assert caught.value.__notes__ == ["while computing batch 2 (samples 6, 7, 8)"]
    assert plain(batches) == [[9, 10, 11]]


def test_an_error_of_a_class_that_cannot_be_pickled_still_arrives() -> None:
    class Local(Exception):
        pass

    with pytest.raises(RuntimeError, match="Local: inner"):
        list(penstock.DataLoader(Failing(lambda: Local("inner")), num_workers=1))


def test_a_sample_that_exits_is_an_error_and_does_not_end_the_trainer() -> None:
    with pytest.raises(RuntimeError, match=r"worker 0 exited unexpectedly: the dataset called sys.exit\(3\)"):
        list(penstock.DataLoader(Failing(lambda: SystemExit(3)), num_workers=1))


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_after_a_sample_that_exits_the_loop_goes_on(in_order: bool, error: type[BaseException]) -> None:
    loader = penstock.DataLoader(Failing(error), batch_size=4, num_workers=1, in_order=in_order)
    batches = iter(loader)
    assert next(batches).tolist() == [0, 1, 2, 3]
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        next(batches)
    assert plain(batches) == [[8, 9, 10, 11]]


@pytest.mark.parametrize("in_order", [True, False])
def test_after_a_workers_death_the_loop_says_so_again_and_does_not_wait(in_order: bool) -> None:
    batches = iter(penstock.DataLoader(Killing(), batch_size=4, num_workers=1, in_order=in_order))
    assert next(batches).tolist() == [0, 1, 2, 3]
    for _ in range(3):
        with pytest.raises(WorkerDied, match=r"SIGKILL.*samples 4, 5, 6, 7"):
            next(batches)


def test_after_a_workers_death_the_next_loop_has_new_persistent_workers(tmp_path: Path) -> None:
    class KillingOnce(Numbers):
        def __getitem__(self, index: int) -> torch.Tensor:
            if index == 5 and not (tmp_path / "killed").exists():
                (tmp_path / "killed").touch()
                os.kill(os.getpid(), 9)
            return super().__getitem__(index)

    before = children()
    with penstock.DataLoader(KillingOnce(8), batch_size=2, num_workers=2, persistent_workers=True) as loader:
        with pytest.raises(WorkerDied):
            list(loader)
        assert plain(loader) == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert wait_until(lambda: len(children() - before) == 2)


@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.stress)])
def test_a_killed_worker_is_named_with_its_signal_and_its_samples(method: str) -> None:
    batches = iter(penstock.DataLoader(Killing(), batch_size=2, num_workers=2, multiprocessing_context=method))
    begin = time.monotonic()
    with pytest.raises(WorkerDied, match=r"Worker 0 .*SIGKILL.*batch 2 \(samples 4, 5\).*memory") as caught:
        list(batches)
    assert isinstance(caught.value, RuntimeError)
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize("in_order", [True, False])
def test_a_batch_that_takes_longer_than_the_timeout_is_an_error(in_order: bool) -> None:
    loader = penstock.DataLoader(Slow(), batch_size=3, num_workers=1, timeout=2, in_order=in_order)
    batches = iter(loader)
    assert next(batches).tolist() == [0, 1, 2]
    with pytest.raises(RuntimeError, match=r"DataLoader timed out after 2 seconds: worker 0 .*batch 1 \(samples 3"):
        next(batches)


def test_out_of_order_a_slow_batch_holds_up_no_other() -> None:
    class FirstIsSlow(Numbers):
        def __getitem__(self, index: int) -> Any:
            if index == 0:
                time.sleep(3)
            return index

    seen = [batch.item() for batch in penstock.DataLoader(FirstIsSlow(12), num_workers=2, in_order=False)]
    assert sorted(seen) == list(range(12))
    assert seen[0] != 0
    ended = [batch.tolist() for batch in penstock.DataLoader(Split(5), batch_size=2, num_workers=2, in_order=False)]
    assert sorted(sample[0] for batch in ended for sample in batch) == [0, 1, 2, 3, 4, 5, 7, 9]


class WithState(Numbers):
    """A dataset whose workers are asked where they stand before the first batch."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


@pytest.mark.parametrize("dataset_class", [Numbers, WithState])
def test_prefetch_factor_says_how_many_batches_are_begun(dataset_class: type[Numbers]) -> None:
    class Asked(list[list[int]]):
        def __iter__(self) -> Any:
            for index in range(100):
                self.append([index])
                yield [index]

    asked = Asked()
    batches = iter(penstock.DataLoader(dataset_class(100), batch_sampler=asked, num_workers=2, prefetch_factor=3))
    assert len(asked) == 6
    next(batches)
    assert len(asked) == 7


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("dataset", [Numbers(), Split()])
def test_a_loop_that_is_left_early_is_followed_by_a_whole_one(persistent: bool, dataset: Any) -> None:
    loader = penstock.DataLoader(dataset, batch_size=2, num_workers=2, persistent_workers=persistent)
    whole = [batch.reshape(2, -1)[:, 0].tolist() for batch in loader if len(batch) == 2]
    for _ in zip(range(2), loader, strict=False):
        pass
    assert [batch.reshape(2, -1)[:, 0].tolist() for batch in loader if len(batch) == 2] == whole


def test_workers_and_descriptors_are_gone_when_the_loop_is() -> None:
    list(penstock.DataLoader(Numbers(), num_workers=2))
    before, descriptors = children(), open_descriptors()
    for _ in range(3):
        batches = iter(penstock.DataLoader(Numbers(), num_workers=2))
        next(batches)
        del batches
    list(penstock.DataLoader(Numbers(), num_workers=2))
    loader = penstock.DataLoader(Numbers(), num_workers=2, persistent_workers=True)
    list(loader)
    assert len(children() - before) == 2
    del loader
    assert wait_until(lambda: children() <= before)
    assert open_descriptors() <= descriptors


def test_close_stops_persistent_workers_and_the_next_loop_starts_others() -> None:
    before = children()
    with penstock.DataLoader(Numbers(4), num_workers=1, persistent_workers=True) as loader:
        list(loader)
        assert len(children() - before) == 1
    assert wait_until(lambda: children() <= before)
    assert plain(loader) == [[0], [1], [2], [3]]
    loader.close()


@pytest.mark.parametrize("persistent", [False, True])
def test_a_loop_whose_loader_is_closed_does_not_end_as_if_it_were_complete(persistent: bool) -> None:
    loader = penstock.DataLoader(Numbers(8), batch_size=2, num_workers=1, persistent_workers=persistent)
    batches = iter(loader)
    next(batches)
    loader.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(batches)
    assert loader.state_dict()["position"] == 1
    assert len(list(loader)) == 4
    loader.close()


def test_no_batch_comes_by_way_of_dev_shm() -> None:
    def in_shared_memory() -> int:  # by what this process maps: the folder itself is every other test's too
        return Path("/proc/self/maps").read_text().count("/dev/shm/")

    class Shared(Numbers):
        def __getitem__(self, index: int) -> Any:
            return in_shared_memory(), torch.zeros(1000)

    before = in_shared_memory()
    for there, zeros in penstock.DataLoader(Shared(), batch_size=4, num_workers=1):
        assert (there.max().item(), in_shared_memory()) == (before, before)
        assert not zeros.any()


def test_what_a_dataset_changes_stays_in_the_worker_as_with_torch() -> None:
    class Counting(Numbers):
        count = 0

        def __getitem__(self, index: int) -> int:
            self.count += 1
            return self.count

    data = Counting(4)
    assert plain(penstock.DataLoader(data, num_workers=1)) == [[1], [2], [3], [4]]
    assert plain(penstock.DataLoader(data, num_workers=1)) == [[1], [2], [3], [4]]
    assert data.count == 0
    loader = penstock.DataLoader(data, num_workers=1, persistent_workers=True)
    assert plain(loader) + plain(loader) == [[n] for n in range(1, 9)]


def test_a_loop_belongs_to_the_process_that_began_it() -> None:
    batches = iter(penstock.DataLoader(Numbers(), num_workers=1))
    next(batches)
    pid = os.fork()
    if pid == 0:
        try:
            next(batches)
        except RuntimeError as error:
            os._exit(0 if "before a fork" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len(list(batches)) == 19


def test_threads_that_take_from_one_loop_get_each_batch_once() -> None:
    loop = iter(penstock.DataLoader(Numbers(600), batch_size=2, num_workers=2))
    with ThreadPoolExecutor(4) as threads:
        taken = list(threads.map(list, [loop] * 4))
    assert sorted(torch.cat([batch for batches in taken for batch in batches]).tolist()) == list(range(600))


def test_in_a_forked_child_a_loader_with_persistent_workers_starts_its_own() -> None:
    with penstock.DataLoader(WhereAmI(4), batch_size=2, num_workers=1, persistent_workers=True) as loader:
        (ours,) = set(workers_of(loader))
        pid = os.fork()
        if pid == 0:
            try:
                theirs = set(workers_of(loader))
                loader.close()
                os._exit(int(ours in theirs or len(theirs) != 1))
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert set(workers_of(loader)) == {ours}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_profiler_shows_the_wait_under_torchs_name(num_workers: int) -> None:
    kind = "_MultiProcessingDataLoaderIter" if num_workers else "_SingleProcessDataLoaderIter"
    loader = penstock.DataLoader(Numbers(3), num_workers=num_workers)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        list(loader)
    assert f"enumerate(DataLoader)#{kind}.__next__" in {event.key for event in profile.key_averages()}


def test_a_loop_can_be_taken_from_ahead_of_what_is_handed_over() -> None:
    """As the way to a device does."""
    loader = penstock.DataLoader(Numbers(4), num_workers=1)
    loop = iter(loader)
    batches = loop.batches
    assert wait_until(batches.is_ready)
    taken = [batches.next(), batches.next()]
    assert loader.state_dict()["position"] == 0
    for receipt, _ in taken:
        batches.progress.advance(receipt)
    assert loader.state_dict()["position"] == 2
    assert plain(loop) == [[2], [3]]
    assert batches.next() is None
    assert batches.is_ready()


def test_a_worker_that_ends_is_counted_out_when_its_last_batch_is_handed_over() -> None:
    loader = penstock.DataLoader(StatefulIterator(3), num_workers=2)
    loop = iter(loader)
    batches = loop.batches
    taken = list(iter(batches.next, None))
    assert [batch.tolist() for _, batch in taken] == [[0], [1], [2]]
    assert (loader.state_dict()["position"], loader.state_dict()["ended"]) == (0, [])
    for receipt, _ in taken:
        batches.progress.advance(receipt)
    assert loader.state_dict()["position"] == 3
    batches.progress.finish(batches.ended)
    assert loader.state_dict()["position"] is None


def test_statistics_count_what_went_through() -> None:
    loader = penstock.DataLoader(Numbers(), batch_size=4, num_workers=1)
    list(loader)
    stats = loader.stats()
    assert (stats.num_batches, stats.num_bytes, stats.num_workers, stats.prefetch) == (5, 20 * 8, 1, 2)
    assert stats.wait_seconds > 0


def test_an_iterator_has_a_length_and_cannot_be_pickled() -> None:
    loader = penstock.DataLoader(Numbers(), batch_size=3)
    assert len(iter(loader)) == len(loader) == 7
    with pytest.raises(NotImplementedError, match="cannot be pickled"):
        iter(loader).__reduce_ex__(2)


def test_numbers_of_an_iterable_that_says_too_small_a_length_are_warned_of_as_by_torch() -> None:
    class Liar(Repeated):
        def __len__(self) -> int:
            return 3

    for loader_class in (penstock.DataLoader, TorchDataLoader):
        loader = loader_class(Liar(), batch_size=None)
        assert len(loader) == 3
        with pytest.warns(UserWarning, match=r"Length of IterableDataset .* was reported to be 3\(when"):
            list(loader)


@pytest.mark.skipif(sys.platform != "linux", reason="pages are counted in /proc")
def test_a_full_collection_in_a_worker_does_not_copy_the_datasets_objects() -> None:
    import gc

    class Objects(Numbers):
        def __init__(self) -> None:
            super().__init__(2)
            self.objects = [(i, [i]) for i in range(300_000)]  # about 50 MB that the collector tracks

        def __getitem__(self, index: int) -> int:
            gc.collect()
            lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
            fields = dict(line.split(":") for line in lines[1:])
            return int(fields["Private_Dirty"].split()[0])

    used = [batch.item() for batch in penstock.DataLoader(Objects(), num_workers=1)]
    assert max(used) < 25_000  # kB; the interpreter's own pages are among them

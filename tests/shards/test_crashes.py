"""Whatever happens to a writer, what is on disk is the previous dataset or the new one.

Killed, refused by the disk, cut off by a power loss, at every instant there is: each test visits all of
them or random ones, and compares every sample. The old dataset has 8 samples, the others 12 and 5.
"""

import contextlib
import errno
import itertools
import os
import random
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest

import penstock
from filesystem.children import Child, is_killed, run_in_child
from filesystem.disks import mounted_disk
from penstock.errors import DatasetChanged, IncompleteDataset, StorageError, WriterBusy
from penstock.shards import DatasetWriter

from .faults import Counter, KillAt, RefuseAt, intercepted
from .folders import (
    COLUMNS,
    assert_next_writer_tidies,
    assert_tidy,
    contents,
    copy_folder,
    files_of,
    make_samples,
    samples_of,
    write,
)
from .power_loss import Died, Journal
from .strategies import scratch

OLD = make_samples(1, 8)
ADDED = make_samples(2, 4)
APPENDED = OLD + ADDED
NEW = make_samples(3, 5)

# mode -> (dataset before, what is handed in, dataset after)
CHANGES = {"create": (None, NEW, NEW), "append": (OLD, ADDED, APPENDED), "overwrite": (OLD, NEW, NEW)}

every_mode = pytest.mark.parametrize("mode", CHANGES)


@pytest.fixture(scope="module")
def room():
    """A folder with the old dataset in `old`; nothing is in `none`."""
    with scratch() as folder:
        write(folder / "old", OLD)
        assert len(files_of(folder / "old")) >= 4  # three shards, or the tests say little
        contents(folder / "old")  # compiles the kernels before anything is timed or forked
        yield folder


def fresh(room: Path, mode: str) -> Path:
    """A folder as it is before a change."""
    return copy_folder(room / ("none" if mode == "create" else "old"), room / "data")


def change(path: Path, mode: str) -> None:
    write(path, CHANGES[mode][1], mode)


def count_calls(room: Path, mode: str) -> list[str]:
    counter = Counter()
    path = fresh(room, mode)
    with intercepted(counter):
        change(path, mode)
    return counter.names


def change_and_die(path: Path, mode: str, hook: KillAt) -> bool:
    """Change the dataset in a child that `hook` kills; whether it did."""

    def body() -> None:
        with intercepted(hook):
            change(path, mode)

    return is_killed(body)


def assert_old_or_new(path: Path, mode: str) -> bool:
    """Check that one of the two is there, whole; return whether it is the new one."""
    before, _, after = CHANGES[mode]
    found = contents(path)
    assert found in (before, after)
    return found == after


# Kills


@every_mode
@pytest.mark.parametrize(
    "when", ["halfway", *(pytest.param(when, marks=pytest.mark.stress) for when in ("before", "after"))]
)
def test_a_writer_killed_at_any_call_leaves_the_old_dataset_or_the_new_one(room, mode, when):
    names = count_calls(room, mode)
    history = []
    for k, name in enumerate(names, start=1):
        if when == "halfway" and name != "write":
            continue
        path = fresh(room, mode)
        assert change_and_die(path, mode, KillAt(k, when))
        history.append(assert_old_or_new(path, mode))
        assert_next_writer_tidies(path, CHANGES[mode][2 if history[-1] else 0])
    assert history == sorted(history)  # the old one up to an instant, the new one from then on
    assert when == "halfway" or len(set(history)) == 2


def crash_states(room: Path, mode: str, step: int) -> list[Path]:
    """Folders as a killed writer leaves them, from the moment there is something to recover."""
    names = count_calls(room, mode)
    states = []
    for k in range(names.index("mkdir") + 2, len(names) + 1, step):
        path = fresh(room, mode)
        assert change_and_die(path, mode, KillAt(k, "before"))
        states.append(copy_folder(path, room / f"crashed-{mode}-{k}"))
    return states


def recover(path: Path, mode: str) -> None:
    DatasetWriter(path, COLUMNS, mode=mode).abort()


@pytest.mark.parametrize(
    ("mode", "step"),
    [("overwrite", 60)]
    + [pytest.param(mode, 1, marks=[pytest.mark.stress, pytest.mark.timeout(1200)]) for mode in CHANGES],
)
def test_a_writer_killed_while_it_cleans_up_after_a_killed_one_changes_nothing(room, mode, step):
    for crashed in crash_states(room, mode, step):
        expected = contents(crashed)
        next_mode = "create" if expected is None else "append"
        counter = Counter()
        path = copy_folder(crashed, room / "data")
        with intercepted(counter):
            recover(path, next_mode)
        for k in range(1, len(counter.names) + 1):
            path = copy_folder(crashed, room / "data")
            hook = KillAt(k, "before")

            def body(path=path, hook=hook, next_mode=next_mode) -> None:
                with intercepted(hook):
                    recover(path, next_mode)

            assert is_killed(body)
            assert contents(path) == expected
            assert_next_writer_tidies(path, expected)


@pytest.mark.parametrize(
    "rounds", [25, pytest.param(600, marks=[pytest.mark.stress, pytest.mark.timeout(1200)])], ids=["few", "many"]
)
def test_a_writer_killed_at_random_leaves_the_old_dataset_or_the_new_one(room, rounds):
    rng = random.Random(7)
    path = room / "data"
    shutil.rmtree(path, ignore_errors=True)
    begin = time.monotonic()
    run_in_child(lambda: write(path, make_samples(99, 60)))
    usual_seconds = time.monotonic() - begin
    current = contents(path)
    outcomes = []
    for number in range(rounds):
        handed_in = make_samples(100 + number, rng.randint(0, 120))
        if rng.random() < 0.2:
            shutil.rmtree(path, ignore_errors=True)
            current = None
        mode = "create" if current is None else rng.choice(["append", "overwrite"])
        after = (current or []) + handed_in if mode == "append" else handed_in
        with Child(lambda samples=handed_in, mode=mode: write(path, samples, mode)) as child:
            time.sleep(2 * usual_seconds * rng.random() ** 3)  # often early: the first write may have been a slow one
            child.kill()
        found = contents(path)
        assert found in (current, after), (number, mode)
        outcomes.append(found == after)
        if rng.random() < 0.5:  # else the next writer finds the leftovers and its own death on top
            assert_next_writer_tidies(path, found)
        current = found
    assert_next_writer_tidies(path, current)
    assert not all(outcomes)  # some were killed in time


@every_mode
def test_a_killed_writer_leaves_the_lock_free(room, mode):
    path = fresh(room, mode)
    write_begun, written = os.pipe()

    def body() -> None:
        with DatasetWriter(path, COLUMNS, mode=mode, shard_bytes=100) as writer:
            for tokens, label, blob in NEW:
                writer.write({"tokens": tokens, "label": label, "blob": blob})
            os.write(written, b"x")
            time.sleep(60)

    with Child(body) as child:
        os.read(write_begun, 1)
        with pytest.raises(WriterBusy, match=f"process {child.pid} on "):
            DatasetWriter(path, COLUMNS, mode=mode)
        child.kill()
    os.close(write_begun)
    os.close(written)
    change(path, mode)
    assert contents(path) == CHANGES[mode][2]
    assert_tidy(path)


# Power losses


@every_mode
@pytest.mark.parametrize("seed", [0, *[pytest.param(seed, marks=pytest.mark.stress) for seed in range(1, 20)]])
def test_a_power_loss_at_any_instant_leaves_the_old_dataset_or_the_new_one(room, mode, seed):
    path, journal = start_journal(room, mode)
    with intercepted(journal):
        change(path, mode)
    outcomes = lose_power(path, mode, journal, 0, seed)
    assert set(outcomes) == {False, True}
    assert len(outcomes) > 15
    assert all(lose_power(path, mode, journal, len(journal.operations), seed))  # what was committed stays


@every_mode
@pytest.mark.parametrize("step", [6, pytest.param(1, marks=[pytest.mark.stress, pytest.mark.timeout(1200)])])
def test_a_power_loss_while_cleaning_up_after_a_killed_writer_leaves_the_old_dataset_or_the_new_one(room, mode, step):
    path, journal = start_journal(room, mode)
    with intercepted(journal):
        change(path, mode)
    switch = max(i for i, operation in enumerate(journal.operations) if operation.kind == "replace")
    for died_at in sorted({switch + 1, *range(3, len(journal.operations), step)}):
        path, journal = start_journal(room, mode)
        journal.dies_at = died_at
        with intercepted(journal), contextlib.suppress(Died):
            change(path, mode)
        journal.dies_at = None
        next_mode = "create" if contents(path) is None else "append"
        with intercepted(journal):
            recover(path, next_mode)
        lose_power(path, mode, journal, died_at, died_at)


def start_journal(room: Path, mode: str) -> tuple[Path, Journal]:
    disk = room / "disk"
    shutil.rmtree(disk, ignore_errors=True)
    disk.mkdir()
    path = copy_folder(fresh(room, mode), disk / "data")
    return path, Journal(disk)


def lose_power(path: Path, mode: str, journal: Journal, first: int, seed: int) -> list[bool]:
    """Whether the new dataset is there in each state the disk may be in from instant `first` on."""
    rng = random.Random(seed)
    visited = set()
    outcomes = []
    for instant in range(first, len(journal.operations) + 1):
        for state in journal.states(instant, rng):
            if state.key in visited:
                continue
            visited.add(state.key)
            state.restore(journal.root)
            outcomes.append(assert_old_or_new(path, mode))
            assert_next_writer_tidies(path, CHANGES[mode][2 if outcomes[-1] else 0])
    return outcomes


# Refusals


@every_mode
@pytest.mark.parametrize("forever", [False, True], ids=["once", "forever"])
@pytest.mark.parametrize(
    "number", [errno.ENOSPC, pytest.param(errno.EIO, marks=pytest.mark.stress)], ids=errno.errorcode.get
)
def test_a_disk_that_refuses_any_call_gives_a_storage_error_or_success(room, mode, number, forever):
    before, _, after = CHANGES[mode]
    for k, _ in enumerate(count_calls(room, mode), start=1):
        path = fresh(room, mode)
        hook = RefuseAt(k, number, forever=forever)
        descriptors = len(os.listdir("/proc/self/fd"))
        error = None
        with intercepted(hook):
            try:
                change(path, mode)
            except StorageError as caught:
                error = caught
        assert len(os.listdir("/proc/self/fd")) == descriptors
        is_new = error is None or "the new dataset is in place" in str(error)
        expected = after if is_new else before
        assert contents(path) == expected
        assert error is None or str(room) in str(error)
        assert_next_writer_tidies(path, expected)


@every_mode
def test_a_full_disk_at_any_call_leaves_no_files_behind(room, mode):
    names = count_calls(room, mode)
    for k, name in enumerate(names, start=1):
        if name not in ("mkdir", "write", "pwrite", "fsync", "replace"):
            continue
        path = fresh(room, mode)
        with intercepted(RefuseAt(k, errno.ENOSPC, forever=False)):
            try:
                change(path, mode)
            except StorageError as error:
                is_new = "the new dataset is in place" in str(error)
            else:
                is_new = True
        if is_new:
            continue
        if mode == "create":
            assert not path.exists()
        else:
            assert files_of(path) == files_of(room / "old")


@every_mode
def test_short_writes_make_no_difference(room, mode):
    def half(name, real, args, kwargs):
        return real(args[0], args[1][: max(1, len(args[1]) // 2)]) if name == "write" else real(*args, **kwargs)

    path = fresh(room, mode)
    with intercepted(half):
        change(path, mode)
    assert contents(path) == CHANGES[mode][2]


def test_a_shard_that_vanished_before_the_commit_is_an_error_and_not_a_dataset(room):
    path = fresh(room, "append")
    writer = DatasetWriter(path, COLUMNS, mode="append", shard_bytes=1)
    for _ in range(2):
        writer.write({"tokens": [1], "label": 2, "blob": b"3"})
    (shard,) = (path / ".writing").iterdir()
    shard.unlink()  # as a cleaner of temporary files would
    with pytest.raises(StorageError, match="No such file"):
        writer.close()
    assert contents(path) == OLD
    assert_tidy(path)


def test_a_sync_that_fails_after_the_switch_says_that_the_new_dataset_is_there_and_keeps_the_old_shards(room):
    path = fresh(room, "overwrite")
    old_shards = {name for name in os.listdir(path) if name.startswith("shard-")}
    names = count_calls(room, "overwrite")
    fresh(room, "overwrite")
    switch = max(k for k, name in enumerate(names, start=1) if name == "replace")
    sync = next(k for k, name in enumerate(names, start=1) if k > switch and name == "fsync")
    with (
        intercepted(RefuseAt(sync, errno.EIO, forever=False)),
        pytest.raises(StorageError, match="the new dataset is in place, but the disk did not confirm the write"),
    ):
        change(path, "overwrite")
    assert contents(path) == NEW
    assert old_shards <= set(os.listdir(path))  # a power loss may still bring back the old manifest
    assert_next_writer_tidies(path, NEW)


def test_what_cannot_be_removed_after_the_switch_is_left_to_the_next_writer(room, caplog):
    path = fresh(room, "overwrite")

    def keep_shards(name, real, args, kwargs):
        if name == "unlink" and "shard-" in str(args[0]):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        return real(*args, **kwargs)

    with intercepted(keep_shards):
        change(path, "overwrite")
    assert "left for the next writer to clean up" in caplog.text
    assert contents(path) == NEW
    assert_next_writer_tidies(path, NEW)


# Full disks


def fill(path: Path, mode: str) -> None:
    samples = make_samples(5, 40)
    with DatasetWriter(path, COLUMNS, mode=mode, shard_bytes=100_000) as writer:
        for tokens, label, blob in samples:
            writer.write({"tokens": tokens, "label": label, "blob": blob + bytes(8000)})


@every_mode
def test_a_limit_on_file_size_names_path_and_bytes_and_the_next_run_succeeds(room, mode):
    path = fresh(room, mode)

    def body() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        fill(path, mode)

    pattern = r"data/\.writing/shard-\S+\.safetensors: File too large \(wrote 50,000 of 1\d\d,\d\d\d bytes\)"
    with pytest.raises(StorageError, match=pattern):
        run_in_child(body)
    assert contents(path) == CHANGES[mode][0]
    if path.exists():
        assert_tidy(path)
    change(path, mode)
    assert contents(path) == CHANGES[mode][2]


@pytest.fixture
def small_disk(tmp_path):
    with mounted_disk(tmp_path / "disk", 1 << 20) as disk:
        yield disk


@every_mode
@pytest.mark.parametrize("free_kib", [0, 4, 16, 64, 128, 256, 300])
def test_a_full_disk_names_path_and_bytes_and_after_making_room_the_run_succeeds(room, small_disk, mode, free_kib):
    path = copy_folder(fresh(room, mode), small_disk / "data")
    ballast = small_disk / "ballast"
    usage = shutil.disk_usage(small_disk)
    ballast.write_bytes(bytes(usage.free - free_kib * 1024))
    pattern = r"disk/data.*No space left on device.*[\d,]+ bytes are free there; make room"
    with pytest.raises(StorageError, match=pattern) as caught:
        fill(path, mode)
    assert free_kib <= 4 or " bytes)" in str(caught.value)
    assert contents(path) == CHANGES[mode][0]
    assert shutil.disk_usage(small_disk).free == free_kib * 1024  # nothing was left behind
    ballast.unlink()
    fill(path, mode)
    assert len(contents(path) or []) == (len(OLD) if mode == "append" else 0) + 40
    assert_tidy(path)


# Two at once


@every_mode
def test_of_two_writers_one_works_and_one_fails_at_once(room, mode):
    path = fresh(room, mode)
    begin, writer_begins = os.pipe()
    end, writer_ends = os.pipe()

    def body() -> None:
        with DatasetWriter(path, COLUMNS, mode=mode) as writer:
            os.write(writer_begins, b"x")
            os.read(end, 1)
            for tokens, label, blob in CHANGES[mode][1]:
                writer.write({"tokens": tokens, "label": label, "blob": blob})

    with Child(body) as child:
        os.read(begin, 1)
        for second_mode in ("create", "append", "overwrite"):
            with pytest.raises(WriterBusy, match=rf"{path}: process {child.pid} on .* is writing here"):
                DatasetWriter(path, COLUMNS, mode=second_mode)
        assert contents(path) == CHANGES[mode][0]
        os.write(writer_ends, b"x")
        child.result()
    for descriptor in (begin, writer_begins, end, writer_ends):
        os.close(descriptor)
    assert contents(path) == CHANGES[mode][2]
    assert_tidy(path)


@pytest.mark.parametrize(
    "seconds", [2, pytest.param(60, marks=[pytest.mark.stress, pytest.mark.timeout(300)])], ids=["short", "long"]
)
def test_of_many_writers_that_press_in_each_appends_all_its_samples_or_none(room, seconds):
    path = fresh(room, "append")

    def body(seed: int) -> list[int]:
        done, stop = [], time.monotonic() + seconds
        for number in range(10_000):
            if time.monotonic() > stop:
                break
            try:
                write(path, make_samples(seed + number, 3), "append", shard_bytes=10_000)
                done.append(seed + number)
            except WriterBusy:
                time.sleep(0.001)
        return done

    children = [Child(lambda seed=100_000 * number: body(seed)) for number in (1, 2, 3)]
    done = [child.result() for child in children]
    labels = [label for _, label, _ in contents(path) or []]
    groups = [labels[place] // 1000 for place in range(len(OLD), len(labels), 3)]
    assert sorted(groups) == sorted(itertools.chain(*done))
    assert all(done)
    assert labels[len(OLD) :] == [1000 * seed + number for seed in groups for number in range(3)]
    assert_tidy(path)


def test_a_writer_that_is_done_does_not_touch_the_work_of_the_next(room, monkeypatch):
    from penstock.filesystem import DirectoryLock

    path = fresh(room, "append")
    real = DirectoryLock.release
    second = []

    def release_and_let_the_next_in(lock: DirectoryLock) -> None:
        was_held = lock.is_held
        real(lock)
        if was_held and not second:
            second.append(DatasetWriter(path, COLUMNS, mode="append"))

    monkeypatch.setattr(DirectoryLock, "release", release_and_let_the_next_in)
    change(path, "append")
    with second[0] as writer:
        writer.write({"tokens": [1], "label": 2, "blob": b"3"})
    assert contents(path) == [*APPENDED, ([1], 2, b"3")]
    assert_tidy(path)


def test_a_forked_copy_of_a_writer_cannot_touch_its_work(room):
    path = fresh(room, "append")
    with DatasetWriter(path, COLUMNS, mode="append", shard_bytes=1) as writer:
        for _ in range(2):
            writer.write({"tokens": [1], "label": 2, "blob": b"3"})
        run_in_child(writer.abort)
        for forbidden in (writer.close, lambda: writer.write({"tokens": [1], "label": 2, "blob": b"3"})):
            with pytest.raises(ValueError, match="belongs to the process that made it"):
                run_in_child(forbidden)
        assert contents(path) == OLD
    assert contents(path) == [*OLD, ([1], 2, b"3"), ([1], 2, b"3")]
    assert_tidy(path)


# Readers


@pytest.mark.parametrize("io", ["map", "pread"])
@pytest.mark.parametrize("num_opened", [0, 1, len(OLD)])
def test_a_reader_of_a_dataset_that_is_overwritten_gets_old_data_or_learns_of_it(room, io, num_opened):
    path = fresh(room, "overwrite")
    dataset = penstock.open(path, io=io)
    opened = [dataset[index]["label"] for index in range(num_opened)]
    assert opened == [label for _, label, _ in OLD[:num_opened]]
    change(path, "overwrite")
    outcomes = []
    for index, (tokens, label, blob) in enumerate(OLD):
        try:
            sample = dataset[index]
        except DatasetChanged:
            outcomes.append("changed")
        else:
            assert (sample["tokens"].tolist(), sample["label"], sample["blob"]) == (tokens, label, blob)
            outcomes.append("old")
    assert ("changed" in outcomes) == (num_opened < len(OLD))
    assert ("old" in outcomes) == (num_opened > 0)
    if num_opened < len(OLD):
        with pytest.raises(DatasetChanged, match="Open it again"):
            dataset.read(range(len(OLD)))
    else:
        assert samples_of(dataset) == OLD


@pytest.mark.parametrize("io", ["map", "pread"])
def test_a_reader_of_a_dataset_that_is_appended_to_keeps_reading_what_it_opened(room, io):
    path = fresh(room, "append")
    dataset = penstock.open(path, io=io)
    change(path, "append")
    assert samples_of(dataset) == OLD
    assert contents(path, io) == APPENDED


@pytest.mark.parametrize("io", ["map", "pread"])
@pytest.mark.parametrize(
    "seconds", [2, pytest.param(60, marks=[pytest.mark.stress, pytest.mark.timeout(300)])], ids=["short", "long"]
)
def test_readers_beside_a_writer_that_overwrites_see_one_dataset_at_a_time(room, io, seconds):
    path = fresh(room, "overwrite")
    stop = time.monotonic() + seconds

    def overwrite() -> int:
        generation = 100
        while time.monotonic() < stop:
            generation += 1
            write(path, make_samples(generation, 8), "overwrite")
        return generation

    seen, num_changed = set(), 0
    with Child(overwrite) as child:
        while time.monotonic() < stop:
            dataset = penstock.open(path, io=io)
            try:
                generation = int(dataset[random.randrange(8)]["label"]) // 1000
                assert samples_of(dataset) == make_samples(generation, 8)
                seen.add(generation)
            except DatasetChanged:
                num_changed += 1
        assert child.result() > 105
    assert len(seen) > 3
    assert num_changed > 0


def test_before_the_first_commit_there_is_no_dataset_to_open(room):
    path = fresh(room, "create")
    with DatasetWriter(path, COLUMNS, shard_bytes=100) as writer:
        for tokens, label, blob in NEW:
            writer.write({"tokens": tokens, "label": label, "blob": blob})
        with pytest.raises(IncompleteDataset, match=f"not finished; process {os.getpid()} on .* is writing it"):
            penstock.open(path)
    assert contents(path) == NEW


def test_a_signal_that_python_turns_into_an_exception_leaves_the_old_dataset(room):
    path = fresh(room, "overwrite")

    def body() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background may ignore it
        with DatasetWriter(path, COLUMNS, mode="overwrite", shard_bytes=100) as writer:
            for tokens, label, blob in NEW:
                writer.write({"tokens": tokens, "label": label, "blob": blob})
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run_in_child(body)
    assert files_of(path) == files_of(room / "old")

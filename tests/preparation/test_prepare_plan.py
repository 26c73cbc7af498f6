"""Tasks are pure data: how files become tasks, and what adding files changes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.preparation._specification import Specification
from penstock.preparation._tasks import MIN_TASK_BYTES, choose_task_bytes, group_splits, least_task_bytes, name_tasks
from penstock.sources import SourceFile, Split
from penstock.transforms import DecodeImage, Tokenize

MB = 1 << 20


def whole(name: str, num_bytes: int) -> Split:
    return Split("jsonl", name, 0, num_bytes, num_bytes)


def halves(name: str, num_bytes: int) -> list[Split]:
    middle = num_bytes // 2
    return [Split("jsonl", name, 0, middle, middle), Split("jsonl", name, middle, num_bytes, num_bytes - middle)]


def paths(groups: list[tuple[Split, ...]]) -> list[list[str]]:
    return [[split.path for split in group] for group in groups]


def test_small_files_are_put_together_in_order_until_a_task_is_full() -> None:
    splits = [whole(name, 4) for name in "abcde"]
    assert paths(group_splits(splits, task_bytes=8)) == [["a", "b"], ["c", "d"], ["e"]]


def test_each_part_of_a_large_file_is_a_task_of_its_own() -> None:
    splits = [whole("a", 1), *halves("b", 20), whole("c", 1), whole("d", 1)]
    assert paths(group_splits(splits, task_bytes=10)) == [["a"], ["b"], ["b"], ["c", "d"]]


def test_a_split_larger_than_a_task_is_not_lost() -> None:
    assert paths(group_splits([whole("a", 99), whole("b", 1)], task_bytes=10)) == [["a"], ["b"]]


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(1, 40))
def test_grouping_keeps_every_split_once_and_in_order(sizes: list[int], task_bytes: int) -> None:
    splits = [whole(f"{number:03d}", size) for number, size in enumerate(sizes)]
    assert [split for group in group_splits(splits, task_bytes) for split in group] == splits


@given(st.lists(st.integers(0, 30), max_size=40), st.lists(st.integers(0, 30), max_size=10), st.integers(1, 40))
def test_files_added_behind_change_no_task_but_the_last(old: list[int], new: list[int], task_bytes: int) -> None:
    splits = [whole(f"{number:03d}", size) for number, size in enumerate(old + new)]
    before, after = group_splits(splits[: len(old)], task_bytes), group_splits(splits, task_bytes)
    assert after[: max(0, len(before) - 1)] == before[:-1]


def test_a_key_changes_with_the_specification_the_file_and_the_split() -> None:
    def key(transform: str = "r", identity: str = "1", size: int = 5, first: int = 0, numbered: bool = False) -> str:
        files = [SourceFile("a", size, identity)]
        specification = Specification(
            transform={"name": transform},
            columns={},
            reading={},
            shard_bytes=1,
            task_bytes=1,
            shuffle=None,
            origins="column" if numbered else "manifest",
        )
        groups = [(whole("a", size),)]
        tasks = name_tasks(groups, files, specification=specification, first_split=first, run_name="")
        return tasks[0].key

    assert key() == key(first=3)
    keys = [key(), key(transform="s"), key(identity="2"), key(size=6), key(numbered=True), key(first=3, numbered=True)]
    assert len(set(keys)) == len(keys)


def test_a_task_reads_what_fills_one_shard() -> None:
    assert choose_task_bytes(10**12, 256 * MB, 0.5) == 512 * MB


def test_little_data_is_cut_finer_so_that_every_core_has_work() -> None:
    assert choose_task_bytes(400 * MB, 256 * MB, 0.5) == MIN_TASK_BYTES
    assert MIN_TASK_BYTES < choose_task_bytes(4000 * MB, 256 * MB, 0.5) < 512 * MB
    assert choose_task_bytes(4000 * MB, 1000, 0.5) == 2000


def test_images_are_cut_finer_than_text_because_they_take_longer() -> None:
    text, images = least_task_bytes(Tokenize("bytes")), least_task_bytes(DecodeImage(size=8))
    assert text == MIN_TASK_BYTES == 8 * images
    assert choose_task_bytes(80 * MB, 256 * MB, 1.0, images) == images

"""What a `for` loop runs through, and where the state stands after it."""

from __future__ import annotations

import itertools
import json
import pickle
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.stateful import Stateful

import penstock
from penstock.errors import StateError
from pytorch.examples import documents, expected, numbers, received, rows_of
from pytorch.functions import be_slow

pytestmark = pytest.mark.usefixtures("lasting_fork_servers")

Workers = Literal["thread", "process"]


def make(tail: str = "carry", **options: object) -> penstock.DataLoader:
    return penstock.DataLoader(numbers(10).batch(4, tail=tail), workers="thread", num_workers=2, **options)  # type: ignore[arg-type]


def test_a_loop_is_an_epoch_and_the_next_loop_the_next_epoch() -> None:
    with make() as loader:
        assert [len(loader), *map(len, received(loader))][0] == 3
        assert rows_of(loader) == [2, 3, 4, 5, 6, 7, 8, 9]  # the first loop took rows 0 and 1 of this epoch along
        assert rows_of(loader) == [*range(10), 0, 1]


@pytest.mark.parametrize(
    ("tail", "sizes"),
    [("carry", [4, 4, 4]), ("short", [4, 4, 2]), ("even", [4, 4, 2]), ("pad", [4, 4, 4]), ("drop", [4, 4])],
)
def test_tails(tail: str, sizes: list[int]) -> None:
    with make(tail) as loader:
        assert len(loader) == len(sizes)
        batches = list(loader)
    assert [len(batch["x"]) for batch in batches] == sizes
    if tail == "pad":
        assert batches[-1]["is_repeated"].tolist() == [False, False, True, True]
        assert batches[-1]["x"].tolist() == [8, 9, 0, 1]
    if tail != "carry":
        assert loader.state_dict()["epoch"] == 1
        assert loader.state_dict()["row"] == 0


def test_the_end_of_an_epoch_and_the_start_of_the_next_are_one_state() -> None:
    with make("short") as loader:
        list(loader)
        end = loader.state_dict()
    other = make("short")
    other.set_epoch(1)
    assert other.state_dict() == end
    assert (end["epoch"], end["row"]) == (1, 0)


def test_a_break_leads_to_the_next_epoch_with_one_warning_that_names_the_rows() -> None:
    with make("short") as loader:
        for _ in loader:
            break
        assert len(loader) == 3
        with pytest.warns(UserWarning, match=r"left epoch 0 early: its last 6 rows are skipped") as caught:
            batches = list(loader)
        assert len(caught) == 1
        assert caught[0].filename == __file__
        assert rows_of(batches) == list(range(10))
        assert loader.state_dict()["epoch"] == 2
        assert rows_of(loader) == list(range(10))  # and no second warning


def test_a_break_after_the_last_batch_skips_nothing() -> None:
    with make("short") as loader:
        for step, _ in enumerate(loader):
            if step == 2:
                break
        assert rows_of(loader) == list(range(10))
        assert loader.state_dict()["epoch"] == 2


def test_a_loop_that_was_never_asked_for_a_batch_skips_nothing() -> None:
    with make("short") as loader:
        iter(loader)
        assert rows_of(loader) == list(range(10))
        assert loader.state_dict()["epoch"] == 1


def test_going_on_after_a_break_is_one_line() -> None:
    with make("short") as loader:
        for _ in loader:
            break
        loader.load_state_dict(loader.state_dict())
        assert len(loader) == 3
        assert rows_of(loader) == [4, 5, 6, 7, 8, 9]


def test_set_epoch_with_the_current_epoch_does_not_rewind() -> None:
    with make("short") as loader:
        loader.load_state_dict(loader.state_dict() | {"epoch": 3, "row": 4})
        loader.set_epoch(3)
        assert rows_of(loader) == [4, 5, 6, 7, 8, 9]
        loader.set_epoch(4)
        assert rows_of(loader) == list(range(10))
        loader.set_epoch(1)
        assert loader.state_dict()["epoch"] == 1
        for _ in loader:
            break
        loader.set_epoch(7)  # said on purpose: no warning
        assert rows_of(loader) == list(range(10))
    for wrong in (-1, 1.0, "1"):
        with pytest.raises(ValueError, match="epochs count from 0"):
            loader.set_epoch(wrong)  # type: ignore[arg-type]


def test_an_epoch_that_is_set_before_a_loops_first_batch_is_where_the_loop_begins() -> None:
    with make("short") as loader:
        loop = iter(loader)
        loader.set_epoch(2)
        assert rows_of(loop) == list(range(10))
        assert loader.state_dict()["epoch"] == 3
        loader.load_state_dict(loader.state_dict() | {"epoch": 3, "row": 4})
        loop = iter(loader)
        with pytest.warns(UserWarning, match="in epoch 3, and epoch 4 is asked for: the last 6 rows before it"):
            loader.set_epoch(4)
        assert rows_of(loop) == list(range(10))
        assert loader.state_dict()["epoch"] == 5


def test_set_epoch_with_the_epoch_that_runs_is_nothing_also_at_its_last_batch() -> None:
    with make() as loader:
        seen = []
        for batch in loader:
            seen += batch["x"].tolist()
            loader.set_epoch(0)  # the last batch reaches into epoch 1
    assert seen == [*range(10), 0, 1]


def test_the_usual_loop_over_epochs_sees_every_row_once_per_epoch() -> None:
    with make("short") as loader:
        for epoch in range(3):
            loader.set_epoch(epoch)
            assert rows_of(loader) == list(range(10))


def test_epochs_none_never_stops_and_has_no_gap() -> None:
    with make(epochs=None) as loader:
        rows: list[int] = []
        for batch in loader:
            rows += batch["x"].tolist()
            if len(rows) >= 400:
                break
        with pytest.raises(TypeError, match="never stops"):
            len(loader)
    assert rows == [row % 10 for row in range(400)]


def test_several_epochs_in_one_loop() -> None:
    with make("short", epochs=3) as loader:
        assert len(loader) == 9
        assert rows_of(loader) == [row % 10 for row in range(30)]
        assert loader.state_dict()["epoch"] == 3


def test_len_is_that_of_the_epoch_also_after_a_resume_in_its_middle() -> None:
    with make("short") as loader:
        assert len(loader) == 3
        assert [len(loader) for _ in loader] == [3, 3, 3]
        loader.load_state_dict(loader.state_dict() | {"row": 4})
        assert len(loader) == 3
        assert [len(loader) for _ in loader] == [3, 3]
        assert len(loader) == 3


@pytest.mark.parametrize("tail", ["carry", "short", "even", "pad", "drop"])
@pytest.mark.parametrize("row", range(11))
def test_len_tells_how_many_batches_were_and_are_to_come_from_any_row(tail: str, row: int) -> None:
    loader = penstock.DataLoader(numbers(10).batch(4, tail=tail), num_workers=0)  # type: ignore[arg-type]
    loader.load_state_dict(loader.state_dict() | {"row": row})
    num_batches, row_now = len(loader), loader.state_dict()["row"]
    assert len(list(loader)) == num_batches - row_now // 4
    assert num_batches > 0


def test_rows_that_fill_no_batch_after_a_resume_are_dropped_and_the_next_epoch_follows() -> None:
    saved = make("short")
    next(iter(saved))
    state = saved.state_dict() | {"row": 7}
    with make("drop") as loader:
        loader.load_state_dict(state)
        assert (loader.state_dict()["epoch"], loader.state_dict()["row"]) == (1, 0)
        assert rows_of(loader) == list(range(8))
        assert rows_of(loader) == list(range(8))
        loader.load_state_dict(state | {"row": 3})
        assert rows_of(loader) == [3, 4, 5, 6]
        assert loader.state_dict()["epoch"] == 1


def test_a_plan_without_batches_gives_an_empty_loop_and_no_endless_one() -> None:
    empty = numbers(0).batch(4)
    too_short = numbers(3).batch(4, tail="drop")
    for plan in (empty, too_short, numbers(0).batch(4, tail="drop")):
        with penstock.DataLoader(plan) as loader:
            assert len(loader) == 0
            assert list(loader) == []
            assert list(loader) == []
        with pytest.raises(ValueError, match="has no batches"):
            iter(penstock.DataLoader(plan, epochs=None))


def test_micro_batches_are_pieces_of_a_step_and_state_moves_with_steps() -> None:
    plan = documents().shuffle(seed=1).pack(32).batch(8)
    with penstock.DataLoader(plan, workers="thread", num_workers=2, micro_batch=2) as loader:
        assert len(loader) == 4 * plan.num_batches()
        rows = []
        for step, batch in enumerate(loader):
            assert batch["input_ids"].shape == (2, 32)
            assert batch["num_targets_global"] == plan.read(step // 4)["num_targets"]
            assert (loader.state_dict()["epoch"] * plan.num_rows + loader.state_dict()["row"]) == (step + 1) // 4 * 8
            rows += batch["input_ids"].tolist()
    assert rows == [row for batch in expected(plan) for row in batch["input_ids"]]
    with pytest.raises(ValueError, match="micro_batch=3 does not divide the 8 rows"):
        iter(penstock.DataLoader(plan, micro_batch=3))


@pytest.mark.parametrize(("num_rows", "sizes"), [(9, [1]), (11, [2, 1]), (13, [2, 2, 1]), (15, [2, 2, 2, 1])])
def test_micro_batches_of_a_short_step_are_fewer_and_none_is_empty(num_rows: int, sizes: list[int]) -> None:
    plan = numbers(num_rows).batch(8, tail="short")
    with penstock.DataLoader(plan, workers="thread", micro_batch=2, epochs=2) as loader:
        assert len(loader) == 2 * (4 + len(sizes))
        batches = list(loader)
        assert loader.state_dict()["epoch"] == 2
    assert [len(batch["x"]) for batch in batches] == 2 * [2, 2, 2, 2, *sizes]
    assert [x for batch in batches for x in batch["x"].tolist()] == 2 * list(range(num_rows))


def test_ranks_have_as_many_micro_batches_of_a_short_step_when_one_has_a_row_more() -> None:
    plan = numbers(8 + 5).batch(8, tail="short")
    sizes = []
    for rank in range(2):
        with penstock.DataLoader(plan, micro_batch=2, rank=rank, world_size=2) as loader:
            sizes.append([len(batch["x"]) for batch in loader])
    assert sizes == [[2, 2, 2, 1], [2, 2, 1, 1]]


def test_an_exception_in_the_loop_leaves_the_state_at_the_rows_handed_over() -> None:
    with make("short", prefetch=8) as loader:
        with pytest.raises(ZeroDivisionError):  # noqa: PT012
            for step, _ in enumerate(loader):
                if step == 1:
                    1 / 0  # noqa: B018
        assert loader.state_dict()["row"] == 8
        loader.load_state_dict(loader.state_dict())
        assert rows_of(loader) == [8, 9]


def test_the_state_is_small_plain_and_what_torch_calls_stateful() -> None:
    loader = make()
    assert isinstance(loader, Stateful)
    state = loader.state_dict()
    assert len(pickle.dumps(state)) < 1024
    assert json.loads(json.dumps(state)) == state
    assert {"version", "order", "epoch", "row"} <= state.keys()
    mixed = penstock.mix({"a": (numbers().shuffle(seed=1), 1), "b": (numbers().shuffle(seed=2), 2)}, seed=1, rows=30)
    assert len(json.dumps(penstock.DataLoader(mixed.batch(2)).state_dict())) < 1024


def test_a_state_of_another_mixture_is_refused_and_what_differs_is_named() -> None:
    def mixed(weight: float = 0.5, *, seed: int = 1, of_web: int = 1, rows: int = 30) -> Any:
        web, code = numbers().shuffle(seed=of_web), numbers().shuffle(seed=2)
        mixture = penstock.mix({"web": (web, weight), "code": (code, 0.5)}, seed=seed, rows=rows)
        return penstock.DataLoader(mixture.batch(2))

    state = mixed().state_dict()
    for match, loader in {
        r"mix was .*web 32768/65536, .*is .*web 43691/65536": mixed(1.0),
        r"mix was seed=1, .*is seed=2": mixed(seed=2),
        r"mix was .*epoch=30, .*is .*epoch=40": mixed(rows=40),
        r"Different: source web was [0-9a-f]{16}, is [0-9a-f]{16}\. Batch": mixed(of_web=3),
    }.items():
        with pytest.raises(StateError, match=match):
            loader.load_state_dict(state)
    mixed().load_state_dict(state)


def test_a_state_of_another_order_is_refused_and_what_differs_is_named() -> None:
    docs = documents()
    state = penstock.DataLoader(docs.shuffle(seed=7).pack(32).batch(4)).state_dict()
    cases = {
        r"shuffle was seed=7, .*is seed=8": docs.shuffle(seed=8).pack(32).batch(4),
        r"shuffle was .*group=16, is .*group=4": docs.shuffle(seed=7, group=4).pack(32).batch(4),
        r"pack was length=32.*is length=16": docs.shuffle(seed=7).pack(16).batch(4),
        r"pack was .*'split'.*is .*'drop'": docs.shuffle(seed=7).pack(32, long="drop").batch(4),
        r"window was none, is length=8": docs.shuffle(seed=7).window(8).batch(4),
        r"shuffle was .*, is none": docs.pack(32).batch(4),
        r"data was [0-9a-f]+, is": documents(80).shuffle(seed=7).pack(32).batch(4),
    }
    for match, plan in cases.items():
        with pytest.raises(StateError, match=f"(?s)another order.*{match}.*this may not"):
            penstock.DataLoader(plan).load_state_dict(state)
    allowed = docs.shuffle(seed=7).pack(32, labels="same", pad=9).map(lambda b: b, batched=True).batch(8, tail="short")
    penstock.DataLoader(allowed).load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"version": 2}, "version 2"),
        ({"row": -1}, "row -1"),
        ({"row": 11}, "row 11"),
        ({"epoch": -1}, "Epoch -1"),
        ({"row": 1.0}, "row 1.0"),
        ({"epoch": True}, "Epoch True"),
    ],
)
def test_a_state_that_makes_no_sense_is_refused(change: dict[str, object], match: str) -> None:
    loader = make()
    with pytest.raises(StateError, match=match):
        loader.load_state_dict(loader.state_dict() | change)


@pytest.mark.parametrize("wrong", [{}, None, [], "state", {"epoch": 1}])
def test_what_is_no_state_is_refused(wrong: object) -> None:
    with pytest.raises(StateError, match="Not the state of a loader"):
        make().load_state_dict(wrong)  # type: ignore[arg-type]


def test_state_counts_what_was_handed_over_and_not_what_was_computed_ahead() -> None:
    with make(prefetch=8) as loader:
        for step, _ in enumerate(loader):
            state = loader.state_dict()
            assert state["epoch"] * 10 + state["row"] == 4 * (step + 1)


@pytest.mark.parametrize("convert", [np.int64, torch.tensor])
def test_a_state_that_a_store_gave_back_with_its_own_numbers_is_taken(convert: Any) -> None:
    with make("short") as loader:
        state = loader.state_dict()
        loader.load_state_dict(state | {"epoch": convert(3), "row": convert(4)})
        assert loader.state_dict() == state | {"epoch": 3, "row": 4}
        assert type(loader.state_dict()["row"]) is int


def test_a_second_loop_ends_the_first() -> None:
    with make("short") as loader:
        first = iter(loader)
        assert next(first)["x"].tolist() == [0, 1, 2, 3]
        with pytest.warns(UserWarning, match="last 6 rows"):
            second = iter(loader)
        with pytest.raises(RuntimeError, match="another one was started"):
            next(first)
        assert rows_of(second) == list(range(10))
        third = iter(loader)
        next(third)
        loader.set_epoch(8)
        with pytest.raises(RuntimeError, match="This loop is over"):
            next(third)


@pytest.mark.parametrize("workers", ["thread", pytest.param("process", marks=pytest.mark.stress)])
def test_loops_begun_in_several_threads_end_all_but_one(workers: Workers) -> None:
    plan = numbers(400).map(be_slow).batch(4)
    complete, told = [], []

    def run() -> None:
        try:
            complete.append(rows_of(loader))
        except RuntimeError as error:
            told.append(str(error))

    with warnings.catch_warnings(), penstock.DataLoader(plan, workers=workers, num_workers=2) as loader:
        warnings.simplefilter("ignore")  # of the rows that loops before left out
        threads = [threading.Thread(target=run) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
    assert len(complete) == 1
    assert len(told) == 2
    assert all("This loop is over" in message for message in told)


@pytest.mark.parametrize("workers", ["thread", pytest.param("process", marks=pytest.mark.stress)])
def test_workers_and_prefetch_may_be_changed_from_another_thread(workers: Workers) -> None:
    plan = numbers(200).map(be_slow).batch(4)
    is_over = threading.Event()

    def tune() -> None:
        for number in itertools.cycle((1, 3, 2)):
            if is_over.wait(0.003):
                return
            loader.set_workers(number)
            loader.set_prefetch(number)
            assert loader.stats().num_workers == number

    with (
        penstock.DataLoader(plan, workers=workers, num_workers=2) as loader,
        ThreadPoolExecutor() as pool,
    ):
        batches = iter(loader)
        first = next(batches)  # before it there are no workers to count
        tuning = pool.submit(tune)
        try:
            assert rows_of([first, *batches]) == list(range(200))
        finally:
            is_over.set()
        tuning.result()


@pytest.mark.parametrize("workers", ["thread", "process"])
def test_close_from_another_thread_ends_a_loop_that_waits(workers: Workers) -> None:
    loader = penstock.DataLoader(numbers(2000).map(be_slow).batch(200), workers=workers, num_workers=2)
    batches = iter(loader)
    next(batches)
    closing = threading.Timer(0.05, loader.close)
    closing.start()
    with pytest.raises(RuntimeError, match=r"The loader (is|was) closed"):
        for _ in batches:
            pass
    closing.join()
    assert (loader.stats().num_workers, loader.stats().num_buffers) == (0, 0)


def test_a_closed_loader_says_so_and_starts_again() -> None:
    for options in ({"workers": "inline"}, {"workers": "thread"}, {"workers": "process", "start_method": "fork"}):
        loader = penstock.DataLoader(numbers(10).batch(4, tail="short"), **options)  # type: ignore[arg-type]
        batches = iter(loader)
        next(batches)
        loader.close()
        loader.close()
        with pytest.raises(RuntimeError, match="closed"):
            next(batches)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert rows_of(loader) == list(range(10))
        loader.close()


def test_arguments_that_make_no_sense_are_refused() -> None:
    plan = numbers().batch(4)
    for wrong, match in [
        ({"workers": "threads"}, "'inline', 'thread' and 'process'"),
        ({"num_workers": -1}, "at least 0"),
        ({"num_workers": 1.5}, "at least 0"),
        ({"prefetch": 0}, "prefetch=0"),
        ({"epochs": 0}, "epochs=0"),
        ({"micro_batch": "4"}, "micro_batch='4'"),
        ({"start_method": "exec"}, "'forkserver', 'spawn' and 'fork'"),
        ({"rank": 0}, "both rank and world_size"),
    ]:
        with pytest.raises(ValueError, match=match):
            penstock.DataLoader(plan, **wrong)  # type: ignore[arg-type]

"""States from strangers: whatever `torch.load(weights_only=True)` accepts is resumed from, or refused by name.

Within limits of memory and time, with no network call, and with no change to files.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, Sampler

import penstock
from guarding import guarded, listening, naming, use_or_refuse
from mutating import mutate
from penstock.errors import StateError

from .torch_examples import Numbers


class Attack:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


class Counting(IterableDataset[int]):
    """Numbers, without a state."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(12))


class CountingOn(Counting):
    """Numbers, with a state of plain data."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 12:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not isinstance(state, dict) or type(state.get("at")) is not int:
            raise StateError("not a state of CountingOn")
        self.at = state["at"]


class Drawing(Sampler[int]):
    """A sampler that may draw from any generator, for all the loader knows."""

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(12).tolist() if random.random() < 2 else [])

    def __len__(self) -> int:
        return 12


def loaders(folder: Path) -> dict[str, Any]:
    (folder / "lines.txt").write_text("".join(f"line {number}\n" for number in range(40)))
    generator = torch.Generator().manual_seed(1)
    return {
        "map": lambda: penstock.DataLoader(Numbers(12), batch_size=2, shuffle=True, generator=generator),
        "drawing": lambda: penstock.DataLoader(Numbers(12), batch_size=2, sampler=Drawing()),
        "iterable": lambda: penstock.DataLoader(Counting(), batch_size=2),
        "stateful": lambda: penstock.DataLoader(CountingOn(), batch_size=2),
        "stream": lambda: penstock.DataLoader(penstock.stream(folder / "lines.txt"), batch_size=2),
        "shuffled stream": lambda: penstock.DataLoader(
            penstock.stream(folder / "lines.txt", shuffle_buffer=5), batch_size=2
        ),
    }


def plan_loaders(folder: Path) -> dict[str, Any]:
    with penstock.DatasetWriter(folder / "tokens", {"tokens": "uint16[*]"}) as writer:
        for length in range(1, 30):
            writer.write({"tokens": np.arange(length, dtype=np.uint16)})
    plan = penstock.from_arrays({"x": np.arange(12)}).shuffle(seed=1).batch(2)
    packed = penstock.open(folder / "tokens").shuffle(seed=2).pack(16)
    mixture = penstock.mix({"a": (packed, 0.7), "b": (penstock.open(folder / "tokens").pack(16), 0.3)}, seed=3, rows=30)
    return {
        "plan": lambda: penstock.DataLoader(plan, workers="inline"),
        "plan in threads": lambda: penstock.DataLoader(plan, workers="thread", num_workers=1),
        "packed": lambda: penstock.DataLoader(packed.batch(2), workers="inline"),
        "mixture": lambda: penstock.DataLoader(mixture.batch(2), workers="inline"),
    }


PLANS = ["plan", "plan in threads", "packed", "mixture"]
KINDS = [*PLANS, "map", "drawing", "iterable", "stateful", "stream", "shuffled stream"]


def state_in_epoch(loader: Any) -> dict[str, Any]:
    list(itertools.islice(loader, 2))
    state: dict[str, Any] = loader.state_dict()
    return state


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["iterable", "stateful", "stream"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_state_runs_no_code(kind: str, num_workers: int, tmp_path: Path) -> None:
    attack = pickle.dumps({"dataset": Attack(tmp_path / "attacked")})
    loader = loaders(tmp_path)[kind]()
    loader = penstock.DataLoader(loader.dataset, batch_size=2, num_workers=num_workers)
    state = state_in_epoch(loader)
    state["workers"] = [attack for _ in state["workers"]]
    torch.save(state, tmp_path / "checkpoint.pt")
    loaded = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    other = penstock.DataLoader(loaders(tmp_path)[kind]().dataset, batch_size=2, num_workers=num_workers)
    with pytest.raises(StateError, match=r"The state is damaged: state\['workers'\]\[0\] is b'"):
        other.load_state_dict(loaded)
    next(iter(other))
    assert not (tmp_path / "attacked").exists()


def test_numpy_is_not_made_to_draw_from_behind_its_numbers(tmp_path: Path) -> None:
    loader = loaders(tmp_path)["drawing"]()
    state = state_in_epoch(loader)
    state["draws"]["numpy"][2] = 10**9  # the process would die of it
    with pytest.raises(StateError, match=r"draws\['numpy'\]\[2\] is 1000000000, not an integer from 0 to 624"):
        loader.load_state_dict(state)


@pytest.mark.parametrize("kind", ["iterable", "stateful"])
def test_a_position_far_away_takes_no_time(kind: str, tmp_path: Path) -> None:
    loader = loaders(tmp_path)[kind]()
    state = state_in_epoch(loader) | {"position": 2**47}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader.load_state_dict(state)
    assert len(list(loader)) == 4


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_worker_far_away_takes_no_time(num_workers: int) -> None:
    loader = penstock.DataLoader(Counting(), batch_size=2, num_workers=num_workers)
    loader.load_state_dict(state_in_epoch(loader) | {"workers": [2**47]})
    with contextlib.closing(loader), guarded():
        assert list(loader) == []


def test_a_state_that_is_refused_changes_nothing(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    loader = penstock.DataLoader(Numbers(12), batch_size=2, shuffle=True, generator=generator)
    state = state_in_epoch(loader)
    before = generator.get_state()
    for change in ({"position": -1}, {"draws": state["draws"] | {"generators": ["AAAA"]}}, {"base_seed": "x"}):
        with pytest.raises(StateError):
            loader.load_state_dict(state | change)
        assert torch.equal(generator.get_state(), before)


@dataclass(frozen=True)
class Example:
    """Ways to make loaders by kind, states of each at rest and in mid-epoch, and folders that no state may change."""

    makers: dict[str, Any]
    states: dict[str, list[dict[str, Any]]]
    folders: list[Path]
    nasty: list[Any]


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Example]:
    data, precious = tmp_path_factory.mktemp("data"), tmp_path_factory.mktemp("precious")
    (precious / "thesis.tex").write_text("irreplaceable")
    makers = plan_loaders(data) | loaders(data)
    states = {kind: [make().state_dict(), state_in_epoch(make())] for kind, make in makers.items()}
    with listening() as server:
        elsewhere = [
            f"http://{server}/lines.txt",
            str(precious),
            str(precious / "thesis.tex"),
            "../precious/thesis.tex",
        ]
        yield Example(makers, states, [data, precious], [*MORE, *elsewhere])


MORE = [torch.arange(3), np.arange(3), b"bytes", torch.tensor(1), np.int64(2), float("nan"), (1, 2)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "num_examples", [pytest.param(40, id="short"), pytest.param(4_000, id="long", marks=pytest.mark.stress)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_forged_state_is_resumed_from_or_refused_by_name(kind: str, num_examples: int, example: Example) -> None:
    for seed in range(num_examples):
        generator = random.Random(f"{kind} {seed}")
        state = mutate(generator.choice(example.states[kind]), generator, example.nasty)
        with naming(f"{kind}, seed {seed}"), guarded(*example.folders):
            use_or_refuse(lambda state=state: resume(example.makers[kind](), state))


def resume(loader: Any, state: Any) -> None:
    with contextlib.closing(loader):
        loader.load_state_dict(state)
        list(itertools.islice(loader, 3))

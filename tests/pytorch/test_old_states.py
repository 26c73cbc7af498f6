"""States that the first version of the loader saved, as it saved them, and the batches that followed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from pytorch.examples import plain, plain_batch
from pytorch.torch_examples import Split, StatefulDataset, StatefulIterator

SAVED = json.loads((Path(__file__).parent / "states_of_version_1.json").read_text())


def stream(folder: Path) -> Any:
    """Over a file that was written when the state was saved."""
    path = folder / "numbers.jsonl"
    path.write_text("".join(f'{{"x": {number}}}\n' for number in range(24)))
    os.utime(path, (1, 1))
    return penstock.stream(path, shuffle_buffer=5, seed=3)


LOADERS: dict[str, Callable[[Path], Any]] = {
    "iterator with a state": lambda _: penstock.DataLoader(StatefulIterator(), batch_size=4, num_workers=2),
    "dataset with a state": lambda _: penstock.DataLoader(StatefulDataset(), batch_size=4, num_workers=0),
    "iterable without a state": lambda _: penstock.DataLoader(Split(), batch_size=4, num_workers=2),
    "stream": lambda folder: penstock.DataLoader(stream(folder), batch_size=4, num_workers=0),
    "stream in workers": lambda folder: penstock.DataLoader(stream(folder), batch_size=4, num_workers=2),
    "plan": lambda _: penstock.DataLoader(
        penstock.from_arrays({"x": np.arange(26)}).shuffle(seed=1, group=16).batch(4), num_workers=0
    ),
}


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.filterwarnings("ignore:Split has no state_dict")
def test_a_state_of_the_first_version_goes_on_where_it_stood(name: str, tmp_path: Path) -> None:
    loader = LOADERS[name](tmp_path)
    loader.load_state_dict(SAVED[name]["state"])
    rest = [plain_batch(batch) if isinstance(batch, dict) else plain(batch) for batch in loader]
    assert rest == SAVED[name]["rest"]
    assert len(rest) > 2

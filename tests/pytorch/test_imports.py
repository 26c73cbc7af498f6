"""Swapping the import line loads what a loader needs, and no server, source or tuner."""

from __future__ import annotations

import subprocess
import sys

import pytest

ROOMS = """
import sys
names = [name.split(".") for name in sys.modules if name.startswith("penstock.")]
print(*sorted({name[1] for name in names if sys.modules[".".join(name)].__package__ != "penstock"}))
print("penstock.pytorch._online" in sys.modules)
"""
NEEDED = {"pytorch", "loader", "plan", "dataset", "shards", "order", "packing", "workers", "machine", "filesystem"}
NEEDED |= {"schema", "native"}
LOADERS = {
    "only the import": "",
    "a torch dataset": "assert len(list(DataLoader(range(5), batch_size=2))) == 3",
    "a torch dataset, with workers": "assert len(list(DataLoader(range(5), batch_size=2, num_workers=1))) == 3",
    "a plan": "import numpy as np; list(DataLoader(__import__('penstock').from_arrays({'x': np.arange(4)}).batch(2), "
    "num_workers=0))",
}


def loaded(code: str) -> tuple[set[str], bool]:
    """The rooms that a program loads after its import line, and whether live tuning is among them."""
    command = [sys.executable, "-c", f"from penstock import DataLoader\n{code}\n{ROOMS}"]
    rooms, tuning = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return set(rooms.split()), tuning == "True"


@pytest.mark.parametrize("code", LOADERS.values(), ids=LOADERS)
def test_a_swapped_import_line_loads_only_the_rooms_of_a_loader(code: str) -> None:
    rooms, loads_tuning = loaded(code)
    assert rooms <= NEEDED
    assert not loads_tuning


def test_servers_streams_and_tuning_are_loaded_when_they_are_used() -> None:
    assert "service" in loaded("from penstock import Remote")[0]
    assert "sources" in loaded("from penstock import stream")[0]
    assert loaded("class Rows(list):\n    pass\nDataLoader(Rows([1, 2]), num_workers='auto')")[1]

"""The examples in docstrings do what they show."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src"
# Only these are imported: to look for examples everywhere would load every framework in each process of pytest.
WITH_EXAMPLES = sorted(path for path in (SRC / "penstock").rglob("*.py") if ">>> " in path.read_text())


def named(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("module", [named(path) for path in WITH_EXAMPLES])
def test_examples_in_docstrings_do_what_they_show(module: str) -> None:
    failed, attempted = doctest.testmod(importlib.import_module(module))
    assert attempted
    assert not failed, "what differs was printed"

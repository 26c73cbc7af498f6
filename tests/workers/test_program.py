"""What workers have to import for the functions that they are sent."""

from __future__ import annotations

import functools
import shutil
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from loader.torch_functions import Brighten, say_who_imported_torch
from penstock.workers import needs_torch


@pytest.mark.parametrize(
    ("function", "is_needed"),
    [
        (say_who_imported_torch, True),
        (functools.partial(functools.partial(say_who_imported_torch)), True),
        (Brighten(2), True),
        (Brighten(2).apply, True),
        (np.mean, False),
        (shutil.copy, False),
        (len, False),
    ],
)
def test_torch_is_needed_by_functions_whose_module_imports_it(function: Callable[..., Any], is_needed: bool) -> None:
    assert needs_torch([np.sum, function]) is is_needed
    assert not needs_torch([])


def test_torch_is_not_needed_where_it_was_never_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    assert not needs_torch([say_who_imported_torch])


def test_torch_is_needed_by_a_module_that_only_takes_names_from_one_that_imports_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    functions = type(sys)("augmentation")
    exec("def flip(row): return row", vars(functions))
    monkeypatch.setitem(sys.modules, "augmentation", functions)
    assert not needs_torch([vars(functions)["flip"]])
    vars(functions)["say_who_imported_torch"] = say_who_imported_torch
    assert needs_torch([vars(functions)["flip"]])

"""The settings file: what tuning writes, the loader reads."""

from __future__ import annotations

import os
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import penstock
from penstock.errors import FormatError
from penstock.loader import format_settings, read_settings
from penstock.machine import usable_cpus
from penstock.pytorch import _warnings

MEASURED = {"steps_per_second": 133.1}


def write(path, options):
    path.write_text(format_settings(options, MEASURED, command="penstock tune job.py"))
    return path


def test_options_come_back_as_they_were_and_those_of_the_job_are_kept_apart(tmp_path):
    options = {"num_workers": 2, "in_order": False, "workers": "thread", "mine": "a\x7f\n", "odd name": None}
    path = write(tmp_path / "s.toml", options)
    assert read_settings(path).options == {"num_workers": 2, "in_order": False, "workers": "thread"}
    assert 'mine = "a\\u007f\\n"' in path.read_text()
    assert '# "odd name" = None' in path.read_text()


def test_a_loader_takes_what_the_call_does_not_say(tmp_path):
    path = write(tmp_path / "s.toml", {"num_workers": 3, "prefetch_factor": 5, "persistent_workers": True})
    data = TensorDataset(torch.arange(8))
    loader = penstock.DataLoader(data, batch_size=2, settings=path)
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (3, 5, True)
    loader = penstock.DataLoader(data, batch_size=2, num_workers=1, settings=path)
    assert (loader.num_workers, loader.prefetch_factor) == (1, 5)


def test_without_workers_in_the_call_what_the_file_says_of_workers_does_not_count(tmp_path):
    path = write(tmp_path / "s.toml", {"num_workers": 3, "prefetch_factor": 5, "persistent_workers": True})
    loader = penstock.DataLoader(TensorDataset(torch.arange(8)), batch_size=2, num_workers=0, settings=path)
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (0, None, False)
    assert len(list(loader)) == 4


@pytest.mark.parametrize(("processors", "warns"), [(usable_cpus(), False), (usable_cpus() + 1, True), (None, True)])
def test_a_number_of_workers_that_was_measured_on_this_many_processors_is_not_warned_of(tmp_path, processors, warns):
    _warnings._said.clear()
    measured = MEASURED if processors is None else MEASURED | {"processors": processors}
    path = tmp_path / "s.toml"
    path.write_text(format_settings({"num_workers": 2 * usable_cpus()}, measured, command="penstock tune job.py"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        penstock.DataLoader(TensorDataset(torch.arange(8)), batch_size=2, settings=path)
    assert ["worker processes in total" in str(each.message) for each in caught] == [True] * warns
    _warnings._said.clear()


def test_a_plans_loader_takes_them_too(tmp_path):
    plan = penstock.from_arrays({"x": np.arange(64)}).batch(4)
    path = write(tmp_path / "s.toml", {"num_workers": 3, "workers": "thread", "prefetch": 7})
    with penstock.DataLoader(plan, settings=path) as loader:
        assert [batch["x"].tolist() for batch in loader] == np.arange(64).reshape(16, 4).tolist()
        stats = loader.stats()
    assert (stats.num_workers, stats.prefetch) == (3, 7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version = 1\n[loader\n", "not TOML"),
        ("version = 2\n", "version 2; this Penstock reads settings of version 1"),
        ("[loader]\nnum_workers = 2\n", "version None"),
        ("version = 1\nloader = 3\n", r"expected a table \[loader\]"),
        ("version = 1\n[loader]\nnum_workers = [1]\n", "each a number, a string, true or false"),
        (
            "version = 1\n[loader]\ncollate_fn = 'os:system'\n",
            r"\[loader\] has collate_fn; it may have num_workers",
        ),
        ("version = 1\n[loader]\nnum_workers = 'many'\n", "num_workers='many'"),
        ("version = 1\n[laoder]\nnum_workers = 2\n", r"has laoder; there may be the tables \[loader\]"),
        ("version = 1\nnum_workers = 2\n", r"has num_workers; .* belongs under \[loader\]"),
        ("version = 1\n[loader]\nnum_workers = 1.5\n", "num_workers = 1.5; expected a whole number or a string"),
        ("version = 1\n[loader]\nnum_workers = true\n", "num_workers = true; expected a whole number or a string"),
        ("version = 1\n[loader]\npin_memory = 'no'\n", 'pin_memory = "no"; expected true or false'),
        ("version = 1\n[loader]\nnum_workers = 9223372036854775807\n", "is too large; the limit is 4,096"),
    ],
)
def test_a_file_that_is_no_settings_file_is_refused_with_the_reason(tmp_path, text, message):
    (tmp_path / "s.toml").write_text(text)
    plan = penstock.from_arrays({"x": np.arange(4)}).batch(2)
    with pytest.raises((FormatError, ValueError), match=message):
        penstock.DataLoader(plan, settings=tmp_path / "s.toml")


def test_a_pipe_in_the_place_of_settings_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "s.toml")
    with pytest.raises(FormatError, match="not a regular file"):
        penstock.DataLoader(range(3), settings=tmp_path / "s.toml")


@pytest.mark.parametrize("wrong", ["many", 2.0])
def test_what_is_no_number_of_workers_is_refused_for_torch_datasets_too(wrong):
    with pytest.raises(ValueError, match=f"num_workers={wrong!r}; expected an integer of at least 0, or 'auto'"):
        penstock.DataLoader(TensorDataset(torch.arange(8)), num_workers=wrong)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        penstock.DataLoader(range(3), settings=tmp_path / "nowhere.toml")


def test_a_plan_decides_its_batch_size_also_against_a_settings_file(tmp_path):
    plan = penstock.from_arrays({"x": np.arange(4)}).batch(2)
    with pytest.raises(ValueError, match="batch_size=64 with a plan"):
        penstock.DataLoader(plan, settings=write(tmp_path / "s.toml", {"batch_size": 64}))

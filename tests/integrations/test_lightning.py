"""Lightning's checkpoints resume a plan, or a stream, at the batch after the last one trained on."""

from __future__ import annotations

import importlib
import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.pytorch import _warnings

from .frameworks import documents, expected, packed

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's and Lightning's own


@pytest.fixture(scope="module")
def runs() -> Any:
    """Runs of Lightning, which takes seconds to import: not where these tests are only collected."""
    return importlib.import_module("integrations.lightning_runs")


@pytest.fixture(autouse=True)
def _loaders_are_given_back() -> Iterator[None]:
    """Lightning puts its own `__init__` around each kind of loader, and leaves it there after an error."""
    wrapped = (torch.utils.data.DataLoader, torch.utils.data.BatchSampler, penstock.DataLoader)
    before = [dict(vars(kind)) for kind in wrapped]
    yield
    for kind, attributes in zip(wrapped, before, strict=True):
        for name in vars(kind).keys() - attributes.keys():
            delattr(kind, name)
        for name in ("__init__", "__setattr__", "__delattr__"):
            if name in attributes:
                setattr(kind, name, attributes[name])


@pytest.mark.parametrize("stopped", [3, 6, 8, *(pytest.param(step, marks=pytest.mark.stress) for step in (5, 7, 12))])
def test_lightning_resumes_at_the_next_batch_in_any_epoch(tmp_path: Path, stopped: int, runs: Any) -> None:
    plan, validation = packed(), documents().pack(32).batch(4, tail="even")
    first, second = runs.Noting(), runs.Noting()
    runs.fit(tmp_path, first, runs.DataModule(train=plan, validation=validation, num_workers=0), steps=stopped)
    runs.fit(tmp_path, second, runs.DataModule(train=plan, validation=validation, num_workers=0), steps=20)
    assert first.seen + second.seen == expected(plan, 20)
    assert second.validated


def test_a_checkpoint_saved_after_training_goes_on_with_the_next_epoch(tmp_path: Path, runs: Any) -> None:
    plan, first, second = packed(), runs.Noting(), runs.Noting()
    options: dict[str, Any] = {
        "accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "logger": False,
        "enable_checkpointing": False, "default_root_dir": tmp_path,
    }  # fmt: skip
    stopped = runs.lightning.Trainer(max_steps=3, **options)
    stopped.fit(first, runs.DataModule(train=plan, num_workers=0))
    stopped.save_checkpoint(tmp_path / "after.ckpt")  # Lightning says that epoch 0 was finished
    again = runs.lightning.Trainer(max_steps=8, **options)
    again.fit(second, runs.DataModule(train=plan, num_workers=0), ckpt_path=tmp_path / "after.ckpt")
    steps = expected(plan, 14)  # and that epoch 1 has 3 batches left
    assert first.seen + second.seen == steps[:3] + steps[6:9] + steps[12:]


def stream_loader(folder: Path) -> penstock.DataLoader[Any]:
    (folder / "numbers.jsonl").write_text("".join(f'{{"x": {number}}}\n' for number in range(24)))
    records = penstock.stream(folder / "numbers.jsonl", shuffle_buffer=5)
    return penstock.DataLoader(records, batch_size=4, collate_fn=lambda rows: torch.tensor([row["x"] for row in rows]))


def test_a_loader_without_a_length_resumes_after_the_batch_trained_on_not_the_one_fetched(
    tmp_path: Path, runs: Any
) -> None:
    straight = [batch.tolist() for batch in stream_loader(tmp_path)]
    for stopped in (2, 5):
        first, second, folder = runs.Noting(stopped), runs.Noting(), tmp_path / str(stopped)
        runs.fit(folder, first, runs.DataModule(train=stream_loader(tmp_path)), steps=stopped)
        runs.fit(folder, second, runs.DataModule(train=stream_loader(tmp_path)), steps=6)
        assert first.seen + second.seen == straight


def test_an_endless_loader_resumes_in_a_later_epoch_of_the_plan(tmp_path: Path, runs: Any) -> None:
    plan = packed()
    first, second = runs.Noting(), runs.Noting()
    for model, steps in ((first, 9), (second, 14)):
        runs.fit(
            tmp_path, model, runs.DataModule(train=penstock.DataLoader(plan, epochs=None, num_workers=0)), steps=steps
        )
    assert list(itertools.chain(first.seen, second.seen)) == expected(plan, 14)


def test_what_a_data_module_does_not_have_is_not_missed(tmp_path: Path, runs: Any) -> None:
    class WithoutValidation(runs.Noting):
        validation_step = runs.lightning.LightningModule.validation_step
        test_step = runs.Noting.validation_step

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runs.fit(tmp_path, WithoutValidation(), runs.DataModule(train=packed(), num_workers=0), steps=1)
    assert [str(each.message) for each in caught if "val_dataloader" in str(each.message)] == []
    with pytest.raises(Exception, match="`test_dataloader` must be implemented"):
        runs.lightning.Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path).test(
            WithoutValidation(), runs.DataModule(train=packed())
        )


def test_a_warning_is_shown_at_the_line_that_made_the_loader(runs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_warnings, "_said", set())
    wrapping = runs.lightning.fabric.utilities.data._replace_dunder_methods
    with wrapping(torch.utils.data.DataLoader, "dataset"), pytest.warns(UserWarning, match="processes") as caught:
        penstock.DataLoader([1, 2, 3], num_workers=1_000)
    assert [each.filename for each in caught] == [__file__]


def test_what_the_loader_measured_goes_to_the_loggers(tmp_path: Path, runs: Any) -> None:
    logger = runs.Metrics()
    data = runs.DataModule(train=packed(), num_workers=0)
    runs.fit(tmp_path, runs.Noting(), data, steps=4, logger=logger, callbacks=[runs.LogLoader()], log_every_n_steps=2)
    logged = [(step, set(metrics)) for step, metrics in logger.logged if "data/wait_share" in metrics]
    assert [step for step, _ in logged] == [2, 4]
    assert {"data/wait_seconds", "data/steps_per_second"} <= logged[0][1]


@pytest.mark.parametrize("kind", ["plan", "dataset"])
def test_overfitting_is_refused_with_what_to_do_instead(tmp_path: Path, kind: str, runs: Any) -> None:
    data = runs.DataModule(train=packed()) if kind == "plan" else penstock.DataLoader(documents(), batch_size=4)
    with pytest.raises(ValueError, match=r"overfit_batches. Leave that out, and give a plan over a few samples"):
        runs.fit(tmp_path, runs.Noting(), data, steps=2, overfit_batches=2)

"""`device=` in a loader: the right batches on the device, and a state that counts only what was handed over."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import penstock
from penstock.pytorch import _dataloader, _feed, _torch_run
from pytorch.examples import numbers
from pytorch.fake_device import FakeDevice
from pytorch.torch_examples import Numbers


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """A device that every loader of the test finds under the name "fake"."""
    fake = FakeDevice(copy_seconds=2.0)
    for module in (_dataloader, _torch_run):
        monkeypatch.setattr(module, "find_device", lambda name: None if name is None else fake.device)
    monkeypatch.setattr(_feed, "open_accelerator", lambda _: fake)
    return fake


PLANS: list[Any] = [
    {"workers": "inline"},
    {"workers": "thread", "num_workers": 2},
    {"workers": "process", "num_workers": 2, "start_method": "fork"},
]


def read_on(device: FakeDevice, tensors: Any) -> list[Any]:
    """What kernels that take five seconds each find in tensors."""
    return [device.run_kernel(tensor, 5.0) for tensor in tensors]


@pytest.mark.parametrize("options", PLANS, ids=["inline", "thread", "process"])
def test_batches_of_a_plan_arrive_whole_and_the_state_counts_those_of_the_user(
    device: FakeDevice, options: dict[str, Any]
) -> None:
    plan = numbers(40).shuffle(seed=3).batch(4)
    expected = [batch["x"].tolist() for batch in penstock.DataLoader(plan, workers="inline")]
    with penstock.DataLoader(plan, device="fake", **options) as loader:
        batches = iter(loader)
        reads = []
        for step in range(6):
            reads += read_on(device, [next(batches)["x"]])
            assert loader.state_dict()["row"] == 4 * (step + 1)
        state = loader.state_dict()
        batches.close()  # type: ignore[attr-defined]
    with penstock.DataLoader(plan, device="fake", **options) as loader:
        loader.load_state_dict(state)
        reads += read_on(device, (batch["x"] for batch in loader))
    device.synchronize()
    assert reads == expected
    assert device.faults == []


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("is_persistent", [False, True])
def test_batches_of_a_torch_dataset_arrive_whole(device: FakeDevice, num_workers: int, is_persistent: bool) -> None:
    is_persistent = is_persistent and num_workers > 0
    options: Any = {"batch_size": 3, "num_workers": num_workers, "persistent_workers": is_persistent}
    expected = [batch.tolist() for batch in torch.utils.data.DataLoader(Numbers(20), batch_size=3)]
    loader = penstock.DataLoader(Numbers(20), device="fake", **options)
    for _ in range(2):
        reads = read_on(device, loader)
        device.synchronize()
        assert reads == expected
    batches = iter(loader)
    reads = read_on(device, [next(batches), next(batches)])
    state = loader.state_dict()
    assert state["position"] == 2
    again = penstock.DataLoader(Numbers(20), device="fake", **options)
    again.load_state_dict(state)
    reads += read_on(device, again)
    device.synchronize()
    assert reads == expected
    assert device.faults == []
    for one in (loader, again):
        one.close()


@pytest.mark.parametrize("options", PLANS, ids=["inline", "thread", "process"])
def test_a_function_runs_behind_the_copy_and_before_the_loop_gets_the_batch(
    device: FakeDevice, options: dict[str, Any]
) -> None:
    """On the stream of copies: it reads what was copied, and no kernel of the loop starts before it is over."""
    plan = numbers(40).shuffle(seed=3).batch(4)
    expected = [batch["x"].tolist() for batch in penstock.DataLoader(plan, workers="inline")]
    read: list[Any] = []

    def decode(batch: dict[str, Any]) -> dict[str, Any]:
        assert device.current is device.side
        read.append(device.run_kernel(batch["x"], 3.0))
        return {"y": batch["x"]}

    with penstock.DataLoader(plan, device="fake", on_device=decode, **options) as loader:
        seen = read_on(device, (batch["y"] for batch in loader))
    device.synchronize()
    assert seen == read == expected
    assert device.faults == []
    assert device.now >= len(expected) * (2.0 + 3.0)  # copies and decoding follow each other on their stream


def test_a_function_on_the_device_serves_torch_datasets_too(device: FakeDevice) -> None:
    def double(batch: Any) -> Any:
        return [batch, batch]

    loader = penstock.DataLoader(Numbers(6), batch_size=2, device="fake", on_device=double)
    assert all(one is other for one, other in loader)


class Unkept:
    """Has a `to`, as tensors have, and no `record_stream`."""

    def to(self, *_: Any, **__: Any) -> Unkept:
        return self


def test_what_a_function_may_not_do_is_said(device: FakeDevice) -> None:
    plan = numbers(8).batch(4)
    loader = penstock.DataLoader(plan, device="fake", on_device=lambda batch: Unkept(), workers="inline")
    with loader, pytest.raises(TypeError, match=r"cannot be kept until your kernels are done. Return tensors"):
        next(iter(loader))
    with pytest.raises(ValueError, match="needs device=: it runs on the way to an accelerator"):
        penstock.DataLoader(plan, on_device=print)


def test_byte_strings_come_to_the_function_as_they_are(device: FakeDevice) -> None:
    plan = penstock.from_arrays({"x": [[b"ab", b""], [b"c"]]}).batch(2)
    found: list[Any] = []
    with penstock.DataLoader(plan, device="fake", workers="inline", on_device=lambda b: found.append(b) or b) as loader:
        assert [batch["x"] for batch in loader] == [[[b"ab", b""], [b"c"]]]
    assert found == [{"x": [[b"ab", b""], [b"c"]]}]

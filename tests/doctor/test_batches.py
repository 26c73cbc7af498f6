"""Copies of batches, which are served again."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from penstock.doctor import ScriptLoader  # noqa: E402


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).reshape(2, 3),
        torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(3, requires_grad=True),
        torch.tensor(4.0),
    ],
    ids=["rows", "channels last", "bfloat16", "with a gradient", "a number"],
)
def test_a_copy_is_the_same_and_can_be_changed(tensor: torch.Tensor) -> None:
    replay = ScriptLoader(torch.utils.data.DataLoader([0]), 1, "train.py:9").replay
    replay.keep([tensor, "text"])
    (copied, text) = replay.take()
    assert text == "text"
    assert torch.equal(copied, tensor)
    assert (copied.dtype, copied.stride()) == (tensor.dtype, tensor.stride())
    copied.zero_()
    assert tensor.count_nonzero()

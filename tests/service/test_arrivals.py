"""What becomes of bodies that were read into a slot."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.loader import Item, private_slot
from penstock.schema import Ragged
from penstock.service._arrivals import Arrived, Layouts
from penstock.service._wire import encode


def arrive(batch: dict[str, Any], layouts: Layouts) -> dict[str, Any]:
    body = b"".join(encode(batch, "one").buffers)
    slot = private_slot(1)
    slot.memory(len(body))[: len(body)] = body
    arrived = Arrived.read(slot, len(body), Item(0), 0.0, layouts)
    return arrived.layout.view(slot.memory(len(body)))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (np.arange(8), np.arange(8, 16)),
        (b"ab", b"cd"),
        ({"y": np.arange(3)}, {"y": np.arange(3, 6)}),
        (Ragged(np.arange(4), np.array([0, 1, 4])), Ragged(np.arange(4), np.array([0, 3, 4]))),
    ],
)
def test_a_body_with_the_header_of_another_has_its_own_content(first: Any, second: Any) -> None:
    layouts = Layouts()
    for value in (first, second, first):
        assert repr(arrive({"x": value}, layouts)["x"]) == repr(value)

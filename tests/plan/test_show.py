"""A batch as text: what stands in which row, and whose it is."""

from __future__ import annotations

import string
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models

import penstock
from penstock.errors import StageError

from .examples import tokens_dataset


def letters(ids: list[int]) -> str:
    return "".join(string.ascii_letters[number - 1] for number in ids)


class Letters:
    decode = staticmethod(letters)


def test_a_packed_batch_is_shown_document_by_document() -> None:
    plan = tokens_dataset([5, 3, 9]).pack(8).batch(3)
    shown = plan.show(0, Letters())
    assert shown.startswith("3 rows of 8 places\nrow 0\n")
    for document in ("abcde", "fgh", "ijklmnop"):
        assert f"  │ {document}\n" in shown + "\n"
    assert "├ document 2 from token 8 on: 1 token, 0 predicted\n  │ q\n  ┆ 7 places of padding" in shown
    assert plan.show(0, letters) == shown
    assert "│ 1 2 3 4 5" in plan.show(0)


def test_a_padded_batch_is_shown_whichever_side_the_padding_is_on() -> None:
    for side, where in (("left", " before it"), ("right", "")):
        shown = tokens_dataset([2, 4]).pad(side=side).batch(2).show(0, letters)
        assert shown.splitlines() == [
            "2 rows of 4 places",
            "row 0",
            "  ├ document 0: 2 tokens, 1 predicted",
            "  │ ab",
            f"  ┆ 2 places of padding{where}",
            "row 1",
            "  ├ document 1: 4 tokens, 3 predicted",
            "  │ cdef",
        ]


def test_ranks_sources_and_windows_are_shown() -> None:
    sources: dict[str, Any] = {name: (tokens_dataset([4, 4]).window(4), 1) for name in ("web", "code")}
    plan = penstock.mix(sources, seed=1, rows=8).batch(4)
    both = [plan.show(0, letters, rank=rank, world_size=2) for rank in range(2)]
    assert all(one.startswith("2 rows of 4 places") for one in both)
    assert "web: document" in "".join(both)
    assert "code: document" in "".join(both)


def test_control_characters_of_a_stranger_are_not_passed_on() -> None:
    assert "\x1b" not in tokens_dataset([2]).pack(4).batch(1).show(0, lambda ids: "\x1b[31m")


def test_rows_that_are_no_tokens_are_refused() -> None:
    with pytest.raises(StageError, match=r"window\(\), pack\(\) or pad\(\) makes them"):
        penstock.from_arrays({"x": np.arange(3)}).batch(1).show(0)


def test_rows_that_fill_up_an_epochs_last_batch_are_shown_to_the_ranks_that_read_them() -> None:
    documents = tokens_dataset([4] * 5)
    even = documents.pad().batch(4, tail="even")
    for rank in range(2):
        (trace,) = even.documents(1, rank=rank, world_size=2)
        assert (trace.row, trace.document) == (0, 4)
        assert even.show(1, letters, rank=rank, world_size=2).endswith("document 4: 4 tokens, 3 predicted\n  │ qrst")
    padded = documents.pad().batch(4, tail="pad")
    assert "document 4: 4 tokens, 3 predicted" in padded.show(1, letters)
    assert "document 0: 4 tokens, 0 predicted" in padded.show(1, letters)  # its labels are hidden


def test_control_tokens_are_shown_although_a_tokenizer_would_leave_them_out() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<|end|>": 2}, unk_token="a"))
    tokenizer.add_special_tokens(["<|end|>"])
    data = penstock.from_arrays({"tokens": [np.array([0, 2]), np.array([1, 0, 2])]})
    plan = data.pack(8).batch(1)
    assert "a <|end|>" not in tokenizer.decode([0, 2])
    for shows in (tokenizer, tokenizer.decode):
        assert "│ b a <|end|>" in plan.show(0, shows)

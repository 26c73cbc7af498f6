"""Ids back to text: whatever a dataset holds, there is a text to show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.cli import main
from penstock.transforms import find_decoder

from .tokenizer_examples import hf_tokenizer, tiktoken_encoding, tokenizer_json

STRANGE = {"int64": [-(2**63), -1, 2**40], "uint32": [2**32 - 1, 5_000_000], "uint64": [2**64 - 1]}


@pytest.mark.parametrize("dtype", STRANGE)
@pytest.mark.parametrize("kind", ["bytes", "json", "tiktoken"])
def test_ids_that_a_tokenizer_does_not_have_are_left_out_of_the_text(kind: str, dtype: str) -> None:
    tokenizer: Any = {"bytes": lambda: "bytes", "json": hf_tokenizer, "tiktoken": tiktoken_encoding}[kind]()
    decoder = find_decoder(tokenizer, {})
    assert decoder is not None
    text = "water under the bridge"
    ids = list(text.encode()) if kind == "bytes" else tokenizer.encode(text)
    ids = ids if isinstance(ids, list) else ids.ids
    assert decoder(np.array([*STRANGE[dtype], *ids, *STRANGE[dtype]], dtype)) == text


@pytest.mark.parametrize("verb", ["inspect", "trace"])
def test_a_strangers_tokens_are_shown_by_ones_own_tokenizer(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer_json())
    with penstock.DatasetWriter(tmp_path / "data", {"tokens": "int64[*]"}) as writer:
        writer.write({"tokens": STRANGE["int64"]})
    more = ["--step", "0", "--pack", "8", "--batch", "1"] if verb == "trace" else []
    assert main([verb, str(tmp_path / "data"), "--decode", str(tmp_path / "tokenizer.json"), *more]) == 0
    assert "(3 tokens)" in capsys.readouterr().out or verb == "trace"

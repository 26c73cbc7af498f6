"""The README's snippets run as they stand, on data made for them."""

from __future__ import annotations

import json
import re
import sysconfig
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch.utils.data import TensorDataset

import penstock

README = Path(__file__).parent.parent / "README.md"


def snippets() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


class Model:
    """Stands where the reader's model would; notes what it was given."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def __call__(self, *inputs: Any) -> float:
        self.given.append(inputs)
        return 0.0

    def state_dict(self) -> dict[str, Any]:
        return {}


def test_twenty_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
    texts = [file.read_text(errors="replace") for file in files]
    (tmp_path / "corpus").mkdir()
    pq.write_table(pa.table({"text": texts}), tmp_path / "corpus" / "a.parquet")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|eos|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts[:5], trainer)
    tokenizer.save("tokenizer.json")

    model = Model()
    space: dict[str, Any] = {"model": model, "__name__": "__main__"}
    exec(snippets()[0], space)
    assert len(model.given) == space["plan"].num_batches() > 1
    ids, positions, mask, labels = model.given[0]
    assert ids.shape == positions.shape == labels.shape == (32, 4096)
    assert mask.shape[-2:] == (4096, 4096)
    assert next(iter(space["loader"]))["input_ids"].equal(model.given[1][0])  # the checkpoint was made after step 0


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")
def test_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.jsonl").write_text("".join(json.dumps({"x": number}) + "\n" for number in range(500)))
    rows = torch.arange(128)
    space: dict[str, Any] = {"penstock": penstock, "torch_dataset": TensorDataset(rows)}
    lines = snippets()[1].splitlines()
    exec("\n".join(line for line in lines if "stream" not in line), space)
    assert torch.cat([batch for (batch,) in space["loader"]]).sort().values.equal(rows)
    exec("\n".join(lines), space)
    assert sorted(x for batch in space["loader"] for x in batch["x"].tolist()) == list(range(500))

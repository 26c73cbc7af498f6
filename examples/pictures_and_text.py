"""Train on pictures and text: whole conversations side by side in rows, pictures decoded when their row is due.

    python examples/pictures_and_text.py run/ --steps 40

`prepare` renders each conversation and stores how many tokens its pictures become, without decoding them. `pack` fills
rows under two budgets, tokens and pictures. `decode` runs in the loader's workers. The model is Qwen2-VL's, made small.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path
from typing import Any

import numpy as np
import small_data
import torch
import transformers
from PIL import Image

import penstock
from penstock import masks

PATCH, MERGE, MAX_PIXELS = 14, 2, 84 * 84


def prepared(folder: Path) -> tuple[Path, Path]:
    """Conversations with their pictures, and the processor that they are made for."""
    chats, processor = small_data.pictures(folder)
    if not (folder / "data").exists():
        transform = penstock.Tokenize(
            processor, chat_format="messages", processor=processor, media_root=str(folder), engine="reference"
        )
        penstock.prepare(chats, folder / "data", transform=transform)
    return folder / "data", processor


@penstock.pure
def decode(batch: dict[str, Any]) -> dict[str, Any]:
    """The pictures of a batch as the patches that the model takes, in the order of its documents."""
    encoded = [each for document in batch.pop("images") for each in document]
    patches = [_patches(each, grid) for each, grid in zip(encoded, batch["image_grid_thw"].values, strict=True)]
    empty = np.zeros((0, 3 * 2 * PATCH**2), np.float32)
    return {**batch, "pixel_values": np.concatenate([empty, *patches])}


def _patches(encoded: bytes, grid: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What Qwen2VLImageProcessor makes; in your own run, call that."""
    _, rows, columns = grid.tolist()
    image = Image.open(io.BytesIO(encoded)).convert("RGB").resize((columns * PATCH, rows * PATCH))
    pixels = (np.asarray(image, np.float32) / 127.5 - 1).transpose(2, 0, 1)
    shape = (3, rows // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH)
    cells = pixels.reshape(shape).transpose(1, 4, 2, 5, 0, 3, 6).reshape(rows * columns, 3, 1, PATCH, PATCH)
    return np.repeat(cells, 2, axis=2).reshape(rows * columns, -1)  # a picture is a film of two equal frames


def small_model(image_token_id: int, vocabulary: int) -> Any:
    """Qwen2-VL with two layers for the text and one for the pictures."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
    text = {"vocab_size": vocabulary, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": rope}
    text |= {"bos_token_id": None, "eos_token_id": None}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": PATCH}
    configuration = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, image_token_id=image_token_id)
    return transformers.Qwen2VLForConditionalGeneration(configuration)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()

    data, processor = prepared(arguments.folder)
    packed = (
        penstock.open(data)
        .shuffle(seed=7)
        .pack(256, limits={"images": 12}, long="drop", labels="same", keep=["images", "image_grid_thw"])
    )
    plan = packed.map(decode, batched=True).batch(2)
    print(plan.ledger())

    torch.manual_seed(0)
    names = [small_data.EOS, *small_data.PICTURE_MARKS]
    ids = transformers.PreTrainedTokenizerFast(tokenizer_file=str(processor / "tokenizer.json"))
    pad = ids.convert_tokens_to_ids("<|image_pad|>")
    model = small_model(pad, small_data.VOCABULARY + len(names))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with penstock.DataLoader(plan, workers="thread", num_workers=1, epochs=None) as loader:
        for step, batch in zip(range(arguments.steps), loader, strict=False):
            if step == 0:
                masks.check_isolation(model, batch, image_token_id=pad)
            loss = model(**masks.hugging_face_kwargs(batch, image_token_id=pad)).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 10 == 0 or step == arguments.steps - 1:
                print(f"step {step}: loss {loss.item():.3f}, {len(batch['image_grid_thw'])} documents")


if __name__ == "__main__":
    main()

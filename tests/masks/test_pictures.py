"""Documents with pictures in packed rows: a Qwen2-VL-like model sees each as it would alone."""

from __future__ import annotations

import functools
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock import masks
from penstock.transforms import Tokenize
from transforms.processors import QWEN, picture, save_processor

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's and transformers' own
PAD, MERGE = 90, 2


@functools.cache
def built(attention: str) -> Any:
    return build(attention)


def build(attention: str, vocab_size: int = 97, image_token_id: int = PAD) -> Any:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    torch.manual_seed(0)
    text = {
        "vocab_size": vocab_size, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "rope_theta": 10_000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]},
        "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [2, 3, 3]},
    }  # fmt: skip
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14}
    configuration = Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=image_token_id, video_token_id=vocab_size - 2,
        vision_start_token_id=vocab_size - 3, vision_end_token_id=vocab_size - 4,
    )  # fmt: skip
    configuration._attn_implementation = attention
    return Qwen2VLForConditionalGeneration(configuration).eval()


def make(documents: list[list[Any]], row_length: int, seed: int = 0) -> tuple[Any, list[Any]]:
    """A packed batch of one row per group of documents, and each document by itself: numbers are tokens of text, pairs
    are the grids of pictures."""
    rng = np.random.default_rng(seed)
    alone, tokens = [], []
    for document in documents:
        ids, grids = [], []
        for part in document:
            if isinstance(part, int):
                ids += rng.integers(1, 80, part).tolist()
            else:
                ids += [PAD] * (part[0] * part[1])
                grids.append([1, part[0] * MERGE, part[1] * MERGE])
        grid = np.array(grids, np.int64).reshape(-1, 3)
        pixels = rng.normal(size=(int(grid.prod(axis=1).sum()), 3 * 2 * 14 * 14)).astype(np.float32)
        alone.append({"input_ids": ids, "image_grid_thw": grid, "pixel_values": pixels})
        tokens.append(ids)
    ds = penstock.from_arrays(
        {
            "tokens": penstock.Ragged.from_lengths(np.concatenate(tokens), list(map(len, tokens))),
            "n": np.arange(len(tokens)),
            "image_grid_thw": penstock.Ragged.from_lengths(
                np.concatenate([each["image_grid_thw"] for each in alone]),
                [len(each["image_grid_thw"]) for each in alone],
            ),
        }
    )
    plan = ds.pack(row_length, labels="same", long="drop", keep=["n", "image_grid_thw"]).batch(1, tail="short")
    batch: Any = None
    for step in range(plan.num_rows):
        read = plan.read(step)
        if batch is None or read["num_documents"] > batch["num_documents"]:
            batch = read
    order = batch["n"].tolist()
    batch["pixel_values"] = np.concatenate([alone[each]["pixel_values"] for each in order])
    return {**batch, "image_grid_thw": batch["image_grid_thw"].values}, [alone[each] for each in order]


def logits_alone(model: Any, document: Any) -> torch.Tensor:
    ids = torch.tensor([document["input_ids"]])
    pictures = {}
    if len(document["image_grid_thw"]):
        pictures = {key: torch.from_numpy(document[key]) for key in ("pixel_values", "image_grid_thw")}
    types = (ids == PAD).int()
    with torch.no_grad():
        return model(input_ids=ids, mm_token_type_ids=types, use_cache=False, **pictures).logits[0]


DOCUMENTS = [[3, (2, 3), 4], [7], [2, (1, 2), 1, (3, 2), 5, (2, 2), 1], [5, (1, 1), 2]]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])  # transformers has no flex_attention for it
def test_logits_in_a_packed_row_are_those_of_documents_alone(attention: str) -> None:
    model, (batch, alone) = built(attention), make(DOCUMENTS, 80)
    assert len(alone) == 4
    with torch.no_grad():
        packed = model(**masks.hugging_face_kwargs(batch, image_token_id=PAD)).logits[0]
    for number, document in enumerate(alone):
        found = packed[torch.from_numpy(batch["document_ids"][0] == number)]
        torch.testing.assert_close(found, logits_alone(model, document), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_another_picture_changes_no_other_document(attention: str) -> None:
    model, (batch, _) = built(attention), make(DOCUMENTS, 80)
    masks.check_isolation(model, batch, image_token_id=PAD)


def test_a_model_that_mixes_pictures_is_found_out() -> None:
    model, (batch, _) = built("sdpa"), make(DOCUMENTS, 80)

    def leaky(position_ids: Any = None, **kwargs: Any) -> Any:
        return model(position_ids=position_ids[1:], **kwargs)  # without those of the text, rows are not packed

    with pytest.raises(RuntimeError, match="other tokens in one document of the batch changed the logits"):
        masks.check_isolation(leaky, batch, image_token_id=PAD)


parts = st.one_of(st.integers(1, 4), st.tuples(st.integers(1, 3), st.integers(1, 3)))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(parts, min_size=1, max_size=4), min_size=1, max_size=4))
def test_positions_are_those_of_transformers_document_by_document(documents: list[list[Any]]) -> None:
    documents = [[1, *(each for part in document for each in (part, 1))] for document in documents]
    batch, alone = make(documents, 300)
    found = masks.mrope_position_ids(batch, PAD)
    model = built("sdpa").model
    for number, document in enumerate(alone):
        ids = torch.tensor([document["input_ids"]])
        grids = torch.from_numpy(document["image_grid_thw"])
        expected, _ = model.get_rope_index(ids, (ids == PAD).int(), image_grid_thw=grids)
        is_own = torch.from_numpy(batch["document_ids"] == number)
        assert torch.equal(found[:, is_own], expected[:, 0])
    assert not found[:, torch.from_numpy(batch["document_ids"] < 0)].any()


def test_grids_that_are_not_those_of_the_tokens_are_refused() -> None:
    batch, _ = make(DOCUMENTS, 80)
    with pytest.raises(ValueError, match=r"has 19 tokens 90, but its 5 pictures take 5: .* merge_size=3"):
        masks.mrope_position_ids(batch, PAD, merge_size=3)
    with pytest.raises(TypeError, match=r"'image_grid_thw'.* is NoneType"):
        masks.mrope_position_ids({**batch, "image_grid_thw": None}, PAD)


class Decode:
    """What a training script maps: pictures of a batch to patches, in a worker."""

    __penstock_pure__ = True

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        from PIL import Image
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        images = [Image.open(io.BytesIO(each)).convert("RGB") for document in batch.pop("images") for each in document]
        batch["pixel_values"] = np.zeros((0, 3 * 2 * 14 * 14), np.float32)
        if images:
            made = Qwen2VLImageProcessorPil(max_pixels=56 * 56)(images, return_tensors="np")
            batch["pixel_values"] = made["pixel_values"]
            assert np.array_equal(made["image_grid_thw"], batch["image_grid_thw"].values)
        return batch


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chats")
    processor = save_processor(QWEN, folder / "qwen", max_pixels=56 * 56)
    rows = []
    for number in range(24):
        shown = [{"type": "image", "image": picture(60 + number, 40, seed=each)} for each in range(number % 3)]
        content = [*shown, {"type": "text", "text": f"what is {number}"}]
        answer = {"role": "assistant", "content": [{"type": "text", "text": "a cat"}]}
        rows.append({"messages": [{"role": "user", "content": content}, answer]})
    transform = Tokenize(processor, chat_format="messages", processor=processor, engine="reference")
    penstock.prepare(rows, folder / "ds", transform=transform, workers=1)
    return folder


def plan_of(chats: Path) -> penstock.Plan:
    shuffled = penstock.open(chats / "ds").shuffle(seed=5)
    packed = shuffled.pack(128, limits={"images": 4}, long="drop", labels="same", keep=["images", "image_grid_thw"])
    return packed.map(Decode(), batched=True).batch(2)


def test_pictures_are_decoded_in_the_loader_and_the_model_learns_from_them(chats: Path) -> None:
    source = Tokenize(chats / "qwen")._source
    pad = source.specials["<|image_pad|>"]
    model = build("sdpa", vocab_size=source.vocab_size + 8, image_token_id=pad)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    losses = []
    with penstock.DataLoader(plan_of(chats), num_workers=1, workers="thread") as loader:
        for _, batch in zip(range(12), loader, strict=False):
            loss = model(**masks.hugging_face_kwargs(batch, image_token_id=pad)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


def test_training_goes_on_at_the_next_batch_with_other_ranks(chats: Path) -> None:
    plan = plan_of(chats)
    with penstock.DataLoader(plan, num_workers=0) as loader:
        batches = iter(loader)
        next(batches)
        state, expected = loader.state_dict(), next(batches)
    ranks = []
    for rank in range(2):
        with penstock.DataLoader(plan, num_workers=0, rank=rank, world_size=2) as loader:
            loader.load_state_dict(state)
            ranks.append(next(iter(loader)))
    assert torch.equal(torch.cat([each["input_ids"] for each in ranks]), expected["input_ids"])
    assert torch.equal(torch.cat([each["pixel_values"] for each in ranks]), expected["pixel_values"])

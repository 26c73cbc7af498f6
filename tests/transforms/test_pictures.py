"""Conversations with pictures: the tokens of transformers' processors, and pictures only from where they may be."""

from __future__ import annotations

import base64
import io
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.errors import FormatError
from penstock.sources import Records
from penstock.transforms import Tokenize
from penstock.transforms._pictures import expand
from penstock.transforms._processors import load_expansion

from .processors import IDEFICS, LLAVA, QWEN, load_processor, picture, save_processor

sides = st.integers(1, 4000)
law = settings(deadline=None, max_examples=60)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_processor(name, tmp_path_factory.mktemp(name)) for name in (QWEN, LLAVA, IDEFICS)}


def records(*rows: Any, **columns: list[Any]) -> Records:
    return Records({"messages": list(rows), **columns}, 0, len(rows))


def ask(*parts: Any, answer: str = "a cat") -> list[dict[str, Any]]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": "user", "content": content}, {"role": "assistant", "content": [{"type": "text", "text": answer}]}]


def shown(data: Any) -> dict[str, Any]:
    return {"type": "image", "image": data}


def tokenized(folder: Path, given: Records, **options: Any) -> Any:
    transform = Tokenize(folder, chat_format="messages", processor=folder, engine="reference", **options)
    return transform.open()(given)


@law
@given(sides, sides)
def test_pictures_for_qwen_become_as_many_tokens_as_its_processor_makes(height: int, width: int) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

    processor = Qwen2VLImageProcessorPil()
    expansion = _expansion(QWEN)
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(ValueError, match="more than 200 times"):
            expansion.grid(height, width)
        return
    rows, columns = smart_resize(height, width, 28, processor.size["shortest_edge"], processor.size["longest_edge"])
    grid = expansion.grid(height, width)
    assert grid == (1, rows // 14, columns // 14)
    assert expansion.text(height, width) == "<|image_pad|>" * (rows * columns // 28**2)


@law
@given(sides, sides)
def test_pictures_for_idefics_are_cut_into_as_many_tiles_as_its_processor_cuts(height: int, width: int) -> None:
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    _, rows, columns = Idefics3ImageProcessorPil().get_number_of_image_patches(height, width)
    if "processor" not in _found:
        _found["processor"] = load_processor(IDEFICS)
    expected = _found["processor"].replace_image_token({"rows": [[rows]], "cols": [[columns]]}, 0)
    assert _expansion(IDEFICS).text(height, width) == expected


_found: dict[str, Any] = {}


def _expansion(name: str) -> Any:
    if name not in _found:
        with tempfile.TemporaryDirectory() as folder:
            _found[name] = load_expansion(save_processor(name, Path(folder)))
    return _found[name]


@pytest.mark.parametrize("name", [LLAVA, IDEFICS])
def test_tokens_are_those_of_the_processor(name: str, folders: dict[str, Path]) -> None:
    processor = load_processor(name)
    pictures = [picture(300, 200), picture(900, 500, "PNG"), picture(64, 64, "WEBP")]
    messages = ask(shown(pictures[0]), "what is this", shown(pictures[1]), "or", shown(pictures[2]))
    output = tokenized(folders[name], records(messages, ask("hello")))
    bare = [{**each, "content": [{**part, "image": None} for part in each["content"]]} for each in messages]
    text = processor.apply_chat_template(bare, tokenize=False)
    images = [PIL_image(each) for each in pictures]
    expected = processor(text=[text], images=[images] if name == IDEFICS else images, add_special_tokens=False)
    assert output.columns["tokens"][0].tolist() == np.asarray(expected["input_ids"][0]).tolist()
    assert output.columns["images"] == [pictures, []]
    assert output.columns["image_sizes"][0].tolist() == [[200, 300], [500, 900], [64, 64]]
    assert output.columns["image_sizes"][1].shape == (0, 2)


def PIL_image(data: bytes) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(data)).convert("RGB")


def test_qwen_gets_its_grids_and_the_loss_is_on_the_answer_alone(folders: dict[str, Path]) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor

    data = picture(300, 200)
    output = tokenized(folders[QWEN], records(ask("see", shown(data), answer="a cat")))
    grids = Qwen2VLImageProcessorPil()([PIL_image(data)], return_tensors="np")["image_grid_thw"]
    assert output.columns["image_grid_thw"][0].tolist() == grids.tolist()
    own = SimpleNamespace(image_processor=Qwen2VLImageProcessorPil(), image_token="<|image_pad|>")
    written = Qwen2VLProcessor.replace_image_token(own, {"image_grid_thw": grids}, 0)  # type: ignore[arg-type]
    tokenizer = Tokenize(folders[QWEN])._source
    pad = tokenizer.specials["<|image_pad|>"]
    tokens, mask = output.columns["tokens"][0], output.columns["loss_mask"][0]
    assert int((tokens == pad).sum()) == written.count("<|image_pad|>")
    learned = penstock.transforms.find_decoder(str(folders[QWEN]), {})(tokens[mask])  # type: ignore[misc]
    assert learned.startswith("a cat")
    assert not mask[: int(np.flatnonzero(tokens == pad)[-1]) + 1].any()


def test_a_picture_comes_by_path_by_url_as_base64_and_from_a_column(folders: dict[str, Path], tmp_path: Path) -> None:
    data = picture(60, 40)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jpg").write_bytes(data)
    encoded = base64.b64encode(data).decode()
    given = [
        shown(data),
        shown({"bytes": data, "path": "anything"}),
        shown({"bytes": None, "path": "in/a.jpg"}),
        shown("in/a.jpg"),
        {"type": "image", "path": str(tmp_path / "in/a.jpg")},
        {"type": "image", "url": f"file://{tmp_path}/in/a.jpg"},
        {"type": "image", "base64": encoded},
        {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{encoded}"}},
        {"type": "image"},
    ]
    rows = records(*(ask(each, "what") for each in given), pictures=[None] * 8 + [[{"bytes": data}]])
    output = tokenized(folders[LLAVA], rows, media_root=str(tmp_path), images_column="pictures")
    assert not output.errors
    assert output.columns["images"] == [[data]] * len(given)
    assert len({tuple(each.tolist()) for each in output.columns["tokens"]}) == 1


def test_what_is_no_picture_that_may_be_read_is_a_bad_row(folders: dict[str, Path], tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "secret.jpg").write_bytes(picture(8, 8))
    (root / "link.jpg").symlink_to(tmp_path / "secret.jpg")
    (root / "broken.jpg").write_bytes(b"no picture")
    outside = ["../secret.jpg", str(tmp_path / "secret.jpg"), "link.jpg", "http://127.0.0.1:9/a.jpg", "a\0b"]
    cases = [(shown(each), "missing_image") for each in [*outside, "absent.jpg", b"", {"path": None}, 7]]
    cases += [
        (shown("broken.jpg"), "corrupt_image"),
        (shown(picture(300, 300)), "too_many_pixels"),
        ({"type": "image", "base64": "*"}, "corrupt_image"),
        ({"type": "video", "video": "a.mp4"}, "unsupported_media"),
        ({"type": "audio", "audio": b"RIFF"}, "unsupported_media"),
    ]
    rows = records(*(ask(each) for each, _ in cases), ask("fine"))
    output = tokenized(folders[LLAVA], rows, media_root=str(root), max_pixels=80_000)
    assert [error.reason for error in output.errors] == [reason for _, reason in cases]
    assert output.sources.tolist() == [len(cases)]
    rootless = tokenized(folders[LLAVA], records(ask(shown("broken.jpg"))))
    assert "Say where paths lead: media_root=" in rootless.errors[0].message


def test_a_picture_too_thin_for_qwen_is_a_bad_row(folders: dict[str, Path]) -> None:
    output = tokenized(folders[QWEN], records(ask(shown(picture(801, 4)))))
    assert "more than 200 times as long" in output.errors[0].message


def test_a_turned_photograph_is_measured_upright(folders: dict[str, Path]) -> None:
    output = tokenized(folders[QWEN], records(ask(shown(picture(300, 200, turned=True)))))
    assert output.columns["image_sizes"][0].tolist() == [[300, 200]]


def test_placeholders_that_a_message_spells_out_are_text(folders: dict[str, Path]) -> None:
    output = tokenized(folders[QWEN], records(ask(shown(picture(60, 40)), "write <|image_pad|> twice: <|image_pad|>")))
    pad = Tokenize(folders[QWEN])._source.specials["<|image_pad|>"]
    assert int((output.columns["tokens"][0] == pad).sum()) == np.prod(output.columns["image_grid_thw"][0]) // 4


def test_a_template_without_places_for_pictures_is_said_to_be_wrong(folders: dict[str, Path]) -> None:
    template = "{% for m in messages %}{{ m.role }}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    output = tokenized(folders[LLAVA], records(ask(shown(picture(9, 9)), "x")), chat_template=template, loss_mask=False)
    assert "wrote 0 placeholders '<image>' for 1 pictures" in output.errors[0].message


@given(st.lists(st.text("abc", max_size=4), min_size=1, max_size=5), st.data())
def test_spans_move_with_what_they_mark(pieces: list[str], data: st.DataObject) -> None:
    said = [data.draw(st.text("XY", max_size=5)) for _ in pieces[1:]]
    text = "<i>".join(pieces)
    begins = np.cumsum([0, *(len(each) + 3 for each in pieces[:-1])])
    spans = tuple((int(b), int(b) + len(each)) for b, each in zip(begins, pieces, strict=True) if each)
    grown, moved = expand(text, spans, "<i>", said)
    assert [grown[a:b] for a, b in moved] == [each for each in pieces if each]
    assert grown == "".join(piece + each for piece, each in zip(pieces, [*said, ""], strict=True))


def test_prepare_stores_pictures_and_counts_those_that_it_skips(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture(100, 50, "PNG"))
    good = ask({"type": "image", "path": "a.png"}, "what is in the picture")
    lines = [good, ask({"type": "image", "path": "gone.png"}), ask("hello"), good]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in lines))
    transform = Tokenize(folders[QWEN], chat_format="messages", processor=folders[QWEN], media_root=str(tmp_path))
    prepared = penstock.prepare(
        tmp_path / "chats.jsonl", tmp_path / "ds", transform=transform, workers=1, on_error="skip"
    )
    ds = penstock.open(tmp_path / "ds")
    assert prepared.skipped == {"missing_image": 1}
    assert ds.lengths("images").tolist() == [1, 0, 1]
    assert ds[0]["images"] == [(tmp_path / "a.png").read_bytes()]
    batch = ds.shuffle(seed=1).pack(256, limits={"images": 1}, long="drop", keep=["images", "image_grid_thw"]).batch(2)
    assert sum(map(len, batch.read(0)["images"])) == 2


def test_what_a_processor_needs_is_said_at_once(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pictures are read from conversations with a chat template"):
        Tokenize(folders[LLAVA], processor=folders[LLAVA])
    with pytest.raises(ValueError, match="one to a row"):
        Tokenize(folders[LLAVA], chat_format="preference", chat_template=True, processor=folders[LLAVA])
    with pytest.raises(FileNotFoundError, match=r"No preprocessor_config.json or processor_config.json in"):
        load_expansion(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"processor_class": "FuyuProcessor"}')
    with pytest.raises(FormatError, match="the processor is 'FuyuProcessor'; pictures are known to Qwen2VLProcessor"):
        load_expansion(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"processor_class": "LlavaProcessor", "crop_size": []}')
    with pytest.raises(FormatError, match="do not say how pictures become tokens"):
        load_expansion(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("[]")
    with pytest.raises(FormatError, match="is no configuration"):
        load_expansion(tmp_path)

"""Processors of three families, made from configurations and small tokenizers, and pictures for them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np

QWEN, LLAVA, IDEFICS = "qwen", "llava", "idefics"
_SPECIALS = {
    QWEN: ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"],
    LLAVA: ["<image>"],
    IDEFICS: ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    + [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)],
}
_PLACES = {QWEN: "<|vision_start|><|image_pad|><|vision_end|>", LLAVA: "<image>\n", IDEFICS: "<image>"}
_ENDS = {QWEN: "<|im_end|>\n", LLAVA: "\n", IDEFICS: "<end_of_utterance>\n"}
_BEGINS = {QWEN: "<|im_start|>ROLE\n", LLAVA: "ROLE: ", IDEFICS: "ROLE:"}


def picture(width: int, height: int, format: str = "JPEG", *, turned: bool = False, seed: int = 0) -> bytes:
    """An encoded picture of noise; `turned` by its EXIF orientation."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    image, file = Image.fromarray(pixels), io.BytesIO()
    exif = Image.Exif()
    if turned:
        exif[0x0112] = 6
    image.save(file, format, **({"exif": exif} if turned else {}))
    return file.getvalue()


def template(name: str) -> str:
    begin, end = _BEGINS[name].split("ROLE"), _ENDS[name]
    role = f"{begin[0]}{{{{ m.role }}}}{begin[1]}"
    place = f"{{% if p.type == 'image' %}}{_PLACES[name]}{{% else %}}{{{{ p.text }}}}{{% endif %}}"
    prompt = f"{{% if add_generation_prompt %}}{begin[0]}assistant{begin[1]}{{% endif %}}"
    return f"{{% for m in messages %}}{role}{{% for p in m.content %}}{place}{{% endfor %}}{end}{{% endfor %}}{prompt}"


def make_tokenizer(name: str) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=_SPECIALS[name], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["hello world what is in the picture a cat"] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made)


def load_processor(name: str) -> Any:
    """The processor as transformers makes it; not for Qwen, which needs torchvision for films."""
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
    from transformers.models.llava.processing_llava import LlavaProcessor

    tokenizer = make_tokenizer(name)
    if name == IDEFICS:
        return Idefics3Processor(
            image_processor=Idefics3ImageProcessorPil(),
            tokenizer=tokenizer,
            image_seq_len=5,
            chat_template=template(name),
        )
    return LlavaProcessor(
        image_processor=LlavaImageProcessorPil(crop_size={"height": 56, "width": 56}, size={"shortest_edge": 56}),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template(name),
    )


def save_processor(name: str, folder: Path, **settings: Any) -> Path:
    """A folder with everything that `prepare` reads."""
    if name != QWEN:
        load_processor(name).save_pretrained(folder)
        return folder
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    make_tokenizer(name).save_pretrained(folder)
    Qwen2VLImageProcessorPil(**settings).save_pretrained(folder)
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "processor_class": "Qwen2VLProcessor"}))
    (folder / "chat_template.jinja").write_text(template(name))
    return folder

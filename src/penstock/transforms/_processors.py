"""How many tokens a picture becomes: the arithmetic of processors, from their configuration files alone.

    folder -> preprocessor_config.json, processor_config.json -> Expansion: (height, width) -> text of a placeholder

transformers computes the same after it has decoded and scaled a picture; here its size does, so nothing is decoded, and
transformers is not imported. Tests compare the two over sizes of every shape.

    qwen       Qwen2-VL, Qwen2.5-VL, Qwen3-VL: about one token for each 28 x 28 pixels, within bounds
    llava      LLaVA 1.5: as many for every picture
    idefics    Idefics3, SmolVLM: a large picture is cut into tiles, each a line of text, beside a small one of all

To add a family, write a class with `placeholder`, `text` and `grid`, and name its processors in `_FAMILIES`.
"""

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from penstock.errors import FormatError
from penstock.filesystem import local_path, similar_path

_FILES = ("preprocessor_config.json", "processor_config.json")
_MOST_ASPECT = 200


@dataclass(frozen=True, slots=True)
class QwenExpansion:
    """Pictures are scaled to whole cells of `patch_size * merge_size` pixels; each cell is a token."""

    placeholder: ClassVar[str] = "<|image_pad|>"
    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """The numbers of a configuration, where bounds have had two names."""
        size = config.get("size") or {}
        least = config.get("min_pixels") or size["shortest_edge"]
        most = config.get("max_pixels") or size["longest_edge"]
        return cls(int(config["patch_size"]), int(config["merge_size"]), int(least), int(most))

    def grid(self, height: int, width: int) -> tuple[int, int, int]:
        """Patches in time, height and width.

        Raises:
            ValueError: the picture is too long and thin.
        """
        if max(height, width) > _MOST_ASPECT * min(height, width):
            raise ValueError(f"one side is more than {_MOST_ASPECT} times as long as the other")
        cell = self.patch_size * self.merge_size
        rows, columns = round(height / cell), round(width / cell)
        if rows * columns * cell**2 > self.max_pixels:
            scale = math.sqrt(height * width / self.max_pixels) * cell
            rows, columns = max(1, math.floor(height / scale)), max(1, math.floor(width / scale))
        elif rows * columns * cell**2 < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (height * width)) / cell
            rows, columns = math.ceil(height * scale), math.ceil(width * scale)
        return 1, rows * self.merge_size, columns * self.merge_size

    def text(self, height: int, width: int) -> str:
        """What a placeholder becomes."""
        _, rows, columns = self.grid(height, width)
        return self.placeholder * (rows * columns // self.merge_size**2)


@dataclass(frozen=True, slots=True)
class LlavaExpansion:
    """Every picture is scaled to one square."""

    placeholder: ClassVar[str] = "<image>"
    num_tokens: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """From the size of the square and of its patches."""
        crop = config.get("crop_size") or config["size"]
        height, width = (crop, crop) if isinstance(crop, int) else (int(crop["height"]), int(crop["width"]))
        patch = int(config["patch_size"])
        others = int(config.get("num_additional_image_tokens") or 0)
        is_default = config.get("vision_feature_select_strategy") == "default"
        return cls((height // patch) * (width // patch) + others - is_default)

    def grid(self, height: int, width: int) -> None:
        """The model does not ask."""

    def text(self, height: int, width: int) -> str:
        """What a placeholder becomes."""
        return self.placeholder * self.num_tokens


@dataclass(frozen=True, slots=True)
class IdeficsExpansion:
    """Pictures are scaled to a longest side and cut into square tiles."""

    placeholder: ClassVar[str] = "<image>"
    _around: ClassVar[str] = "<fake_token_around_image>"
    _most_pixels: ClassVar[int] = 4096
    tile: int
    longest: int
    num_tokens: int
    """For each tile."""
    is_split: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """From the sizes of tiles and of pictures."""
        tile, longest = (int(config[name]["longest_edge"]) for name in ("max_image_size", "size"))
        return cls(tile, longest, int(config["image_seq_len"]), bool(config["do_image_splitting"]))

    def grid(self, height: int, width: int) -> None:
        """The model does not ask."""

    def text(self, height: int, width: int) -> str:
        """What a placeholder becomes."""
        rows, columns = self._tiles(height, width)
        picture, around = self.placeholder * self.num_tokens, self._around
        whole = f"{around}<global-img>{picture}{around}"
        if not rows:
            return whole
        lines = (
            "".join(f"{around}<row_{row}_col_{column}>{picture}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        )
        return f"{''.join(lines)}\n{whole}"

    def _tiles(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tiles; none for a picture that is one tile. Rounded as the processor rounds."""
        if not self.is_split:
            return 0, 0
        for most, is_even in ((self.longest, True), (self._most_pixels, False)):
            height, width = _fit(height, width, most, is_even=is_even)
        rows, columns = math.ceil(height / self.tile), math.ceil(width / self.tile)
        return (rows, columns) if rows > 1 or columns > 1 else (0, 0)


def _fit(height: int, width: int, most: int, *, is_even: bool) -> tuple[int, int]:
    """A size whose longer side is `most`; without `is_even`, only if it is longer."""
    aspect = width / height
    if not is_even and max(height, width) <= most:
        return height, width
    height, width = (int(most / aspect), most) if width >= height else (most, int(most * aspect))
    if is_even:
        height, width = (height + height % 2, width) if width >= height else (height, width + width % 2)
    return max(1, height), max(1, width)


Expansion = QwenExpansion | LlavaExpansion | IdeficsExpansion
"""What a processor writes for pictures; picklable. `placeholder` is what a chat template writes for a picture,
`text` what that becomes, and `grid` the patches in time, height and width, if the model asks for them."""

_FAMILIES: dict[str, type[Expansion]] = {
    "Qwen2VLProcessor": QwenExpansion,
    "Qwen2_5_VLProcessor": QwenExpansion,
    "Qwen3VLProcessor": QwenExpansion,
    "LlavaProcessor": LlavaExpansion,
    "Idefics3Processor": IdeficsExpansion,
    "SmolVLMProcessor": IdeficsExpansion,
}


def load_expansion(folder: str | os.PathLike[str]) -> Expansion:
    """The expansion that a processor's folder describes.

    Raises:
        FileNotFoundError: there is no processor.
        FormatError: it is of no family that is known, or its files lack a number.
    """
    path = local_path(folder, "a processor")
    config = _read_config(path)
    name = config.get("processor_class")
    if name not in _FAMILIES:
        raise FormatError(
            f"{path}: the processor is {name!r}; pictures are known to {', '.join(_FAMILIES)}. "
            "For another one, store tokens, images and sizes with a function of your own: docs/preparation.md#pictures."
        )
    try:
        return _FAMILIES[name].of(config)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(
            f"{path}: the files of the {name} do not say how pictures become tokens ({type(error).__name__}: {error}). "
            f"Save it again: processor.save_pretrained({str(path)!r})."
        ) from None


def _read_config(path: Path) -> dict[str, Any]:
    """Both files as one; newer transformers put the first into the second."""
    found: dict[str, Any] = {}
    for name in _FILES:
        try:
            if (path / name).is_file():
                content = json.loads((path / name).read_bytes())
                found |= content.get("image_processor") or {}
                found |= content
        except (ValueError, AttributeError, RecursionError, TypeError) as error:
            raise FormatError(f"{path / name} is no configuration ({type(error).__name__}: {error}).") from None
    if not found:
        raise FileNotFoundError(f"No {' or '.join(_FILES)} in {path}.{similar_path(path / _FILES[0])}")
    return found


def expansion_identity(expansion: Expansion) -> dict[str, Any]:
    """Everything that decides the text of a picture."""
    return {"family": type(expansion).__name__, **dataclasses.asdict(expansion)}

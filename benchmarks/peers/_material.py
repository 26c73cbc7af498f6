"""What is loaded: Python's own sources and documentation, and photographs from scientific packages."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

PHOTOS = ("astronaut.png", "chelsea.png", "coffee.png", "hubble_deep_field.jpg", "motorcycle_left.png", "rocket.jpg")


def texts(most_bytes: int) -> Iterator[str]:
    """Sources and documentation of Python and of what is installed beside it, the same in every run."""
    left = most_bytes
    for name in ("stdlib", "purelib"):
        for path in sorted(Path(sysconfig.get_path(name)).rglob("*")):
            if path.suffix in (".py", ".rst", ".md", ".txt") and path.is_file() and left > 0:
                text = path.read_text(encoding="utf-8", errors="replace")
                if len(text) > 200:
                    left -= len(text)
                    yield text


def rows(path: Path, num_rows: int, length: int) -> None:
    """Rows of uint16 in one plain file: pairs of bytes of texts stand for tokens."""
    data = b"".join(text.encode() for text in texts(2 * num_rows * length))
    np.resize(np.frombuffer(data[: len(data) // 2 * 2], np.uint16), (num_rows, length)).tofile(path)


def documents(num_tokens: int) -> list[np.ndarray]:
    """Texts as documents of uint16: four bytes stand for a token."""
    found = (np.frombuffer(text.encode()[: len(text.encode()) // 4 * 4], np.uint32) for text in texts(4 * num_tokens))
    return [document.astype(np.uint16) for document in found]


def photos(number: int, width: int = 500, height: int = 375) -> list[bytes]:
    """JPEGs of one size: crops of the photographs that come with scikit-image and scikit-learn."""
    import io

    import skimage
    import sklearn
    from PIL import Image

    names = [Path(skimage.__file__).parent / "data" / name for name in PHOTOS]
    names += sorted((Path(sklearn.__file__).parent / "datasets/images").glob("*.jpg"))
    pictures, rng, encoded = [Image.open(name).convert("RGB") for name in names], np.random.default_rng(0), []
    for place in range(number):
        picture, share = pictures[place % len(pictures)], float(rng.uniform(0.6, 1))
        wide = int(min(picture.width, picture.height * width / height) * share)
        tall = wide * height // width
        left, top = int(rng.integers(0, picture.width - wide + 1)), int(rng.integers(0, picture.height - tall + 1))
        file = io.BytesIO()
        crop = picture.crop((left, top, left + wide, top + tall))
        crop.resize((width, height), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
        encoded.append(file.getvalue())
    return encoded

"""The heavy part: what a server computes for each image, and the plan that says so.

Run as a script it makes a small dataset of noise in place of photographs, and writes `plan.toml`.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import penstock

SIZE = 96


def augment(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Crop, mirror, change the light, blur: about 3 ms of processor time an image."""
    top, left = rng.integers(0, row["image"].shape[0] - SIZE, 2)
    image: NDArray[Any] = row["image"][top : top + SIZE, left : left + SIZE].astype(np.float32) / 255
    if rng.random() < 0.5:
        image = image[:, ::-1]
    image = np.clip(image * rng.uniform(0.7, 1.3) + rng.uniform(-0.1, 0.1), 0, 1)
    for _ in range(24):  # a wide blur as many narrow ones
        image = (
            image + np.roll(image, 1, 0) + np.roll(image, -1, 0) + np.roll(image, 1, 1) + np.roll(image, -1, 1)
        ) / 5
    return {"image": np.ascontiguousarray(image.transpose(2, 0, 1)), "label": row["label"]}


def main() -> None:
    """Make the dataset and the plan."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (2048, 128, 128, 3), dtype=np.uint8)
    with penstock.DatasetWriter("images", {"image": "uint8[128,128,3]", "label": "int64"}, mode="overwrite") as writer:
        writer.write_batch({"image": images, "label": rng.integers(0, 10, len(images))})
    plan = penstock.open("images").shuffle(seed=1).map(augment).batch(32)
    Path("plan.toml").write_text(plan.to_toml())


if __name__ == "__main__":
    from augmentation import main as importable  # so that the plan names `augmentation`, not `__main__`

    importable()

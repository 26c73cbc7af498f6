"""Where the tokens of pictures are: positions in time, height and width (mRoPE), from the index.

Qwen-VL gives each token three positions. Those of text are equal and count on; those of a picture's tokens are its
start, plus their place in its grid; the text after it goes on past its longer side:

    tokens     a  b  [ picture of 1 x 2 x 3 ]  c
    time       0  1  2  2  2  2  2  2          5
    height     0  1  2  2  2  3  3  3          5
    width      0  1  2  3  4  2  3  4          5

In a packed row they start over with each document. transformers counts them in a loop over the pictures of rows that
hold one document; here a few passes over the batch do, whatever it holds, on the device where it is. How many tokens a
picture has follows from its grid, so two pictures side by side are told apart.
"""

from typing import Any

import torch
from torch import Tensor

from penstock.masks._batch import Batch, as_tensor, reach_of_documents, tensor


def mrope_position_ids(batch: Batch, image_token_id: int, *, merge_size: int = 2) -> Tensor:
    """Positions in time, height and width of every token: [3, B, T], starting over with each document.

    Args:
        batch: A packed batch with `image_grid_thw`, of all its pictures in order or kept by document.
        image_token_id: The token that stands for a part of a picture.
        merge_size: Patches of a side that become one token.

    Raises:
        ValueError: an entry is missing, or the tokens of pictures are not as many as their grids say.
        TypeError: an entry is no array.
    """
    tokens, documents = tensor(batch, "input_ids"), tensor(batch, "document_ids")
    is_picture = ((tokens == image_token_id) & (documents >= 0)).reshape(-1)
    grids = picture_grids(batch).to(tokens.device) // torch.tensor([1, merge_size, merge_size], device=tokens.device)
    sizes = grids.prod(dim=1)
    ends = sizes.cumsum(0)
    places = torch.arange(int(ends[-1]) if len(ends) else 0, device=tokens.device)
    if len(places) != int(is_picture.sum()):
        raise ValueError(
            f"the batch has {int(is_picture.sum()):,} tokens {image_token_id}, but its {len(grids):,} pictures take "
            f"{len(places):,}: is image_token_id the processor's, and merge_size={merge_size}?"
        )
    number = torch.searchsorted(ends, places, right=True)
    inside = places - (ends - sizes)[number]
    _, rows, columns = grids[number].unbind(1)
    offsets = torch.zeros(3, is_picture.numel(), dtype=torch.int64, device=tokens.device)
    offsets[:, is_picture] = torch.stack([inside // (rows * columns), inside // columns % rows, inside % columns])
    steps = torch.ones_like(tokens).reshape(-1)
    is_last = inside == sizes[number] - 1
    steps[is_picture] = torch.where(is_last, torch.maximum(rows, columns), 0)
    before = (steps.cumsum(0) - steps).view_as(tokens)
    starts = before - before.gather(1, reach_of_documents(documents).long())
    return starts + offsets.view(3, *tokens.shape)


def picture_grids(batch: Batch) -> Tensor:
    """The grids of all pictures, [N, 3], in the order of the documents that hold them."""
    found: Any = batch.get("image_grid_thw")
    if not hasattr(found, "shape"):  # kept by document: a Ragged
        found = getattr(found, "values", found)
    grids = as_tensor(found, "batch['image_grid_thw']", "expected an int64 tensor or array of shape [N, 3].")
    return grids.reshape(-1, 3).to(torch.int64)

"""How far back each position may look: the one fact behind every mask of this room.

Documents lie in a row one after the other, and attention is causal inside each. So what position
q may see is not a set but an interval of the row: from the first token of its document up to q.
The upper end is q itself; the lower end is the *reach* of q, and an int32 [B, T] tensor of
reaches says all that a [B, T, T] mask says:

    document_ids    0  0  0  1  1 -1 -1
    reach           0  0  0  3  3  5  6        q sees k  <=>  reach[q] <= k <= q

Padding is its own reach: it sees itself and nothing else, so no softmax is taken over nothing
(which would be NaN). Along a row reaches never fall; `_block` rests on that.

The price is one comparison and one running maximum over B * T integers, on the batch's device,
with no value read back by the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

_PADDING = -1


def reach_of_documents(document_ids: Tensor) -> Tensor:
    """The reach of each position, from ids that change where a document ends; -1 is padding."""
    ids, previous = document_ids[:, 1:], document_ids[:, :-1]
    return reach_of_starts((ids != previous) | (ids == _PADDING))


def reach_of_starts(is_start: Tensor) -> Tensor:
    """The reach of each position, from "a document starts here" for positions 1 to T - 1.

    Position 0 is left out because a row's first token always starts a document.
    """
    positions = torch.arange(1, is_start.shape[1] + 1, dtype=torch.int32, device=is_start.device)
    starts = torch.where(is_start, positions, 0)
    return torch.nn.functional.pad(starts, (1, 0)).cummax(dim=1).values

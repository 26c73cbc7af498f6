"""Masks written out in full: one bool for each pair of positions.

The form that every attention function understands, and the reference for the other forms. The
price is memory, B * T * T bytes: 67 MB for one row of 8,192 tokens. It is the only tensor of that
size made here; the triangle is cut into it in place.

True means "may look", as in `scaled_dot_product_attention`. `nn.MultiheadAttention` reads True as
"may not look": hand it `~mask`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from penstock.masks._batch import Batch, as_tensor, tensor
from penstock.masks._reach import reach_of_documents, reach_of_starts


def dense(batch: Batch) -> Tensor:
    """The mask of a packed batch, bool [B, T, T]: row q is True where position q may look.

    A token sees itself and the earlier tokens of its own document; padding sees only itself.
    `mask.unsqueeze(1)` fits `scaled_dot_product_attention`, for all heads.

    Raises:
        ValueError: the batch has no `document_ids`, or they are not [B, T].
        TypeError: they are not int32.

    >>> import numpy as np
    >>> dense({"document_ids": np.array([[0, 0, 1, -1]], dtype=np.int32)})[0].int()
    tensor([[1, 0, 0, 0],
            [1, 1, 0, 0],
            [0, 0, 1, 0],
            [0, 0, 0, 1]], dtype=torch.int32)
    """
    return _written_out(reach_of_documents(tensor(batch, "document_ids")))


def from_token(tokens: Tensor | np.ndarray, token_id: int, eos: bool = True) -> Tensor:
    """The mask of packed tokens whose boundaries are only marked by a token, bool [B, T, T].

    With `eos` the token closes a document and belongs to it; without, it opens one. A row's start
    and end are boundaries too. Prefer `dense`: a token id is a guess about boundaries (a chat
    template that ends each turn with EOS is cut into turns, a document without EOS melts into the
    next), and padding is not recognised, so it forms documents of its own.

    Raises:
        ValueError: tokens are not [B, T].
        TypeError: tokens are not integers in a tensor or array, or the id is no integer.
    """
    if not hasattr(token_id, "__index__"):
        raise TypeError(f"token_id is {token_id!r}; expected the id of the token that ends (or begins) documents.")
    expected = "expected an integer tensor or array of shape [B, T]"
    tokens = as_tensor(tokens, "tokens", expected)
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise TypeError(f"tokens are {str(tokens.dtype).removeprefix('torch.')}; {expected}.")
    if tokens.ndim != 2:
        raise ValueError(f"tokens have shape {list(tokens.shape)}; {expected}.")
    starts = tokens[:, :-1] == token_id if eos else tokens[:, 1:] == token_id
    return _written_out(reach_of_starts(starts))


def _written_out(reach: Tensor) -> Tensor:
    keys = torch.arange(reach.shape[1], dtype=torch.int32, device=reach.device)
    return (reach.unsqueeze(-1) <= keys).tril_()

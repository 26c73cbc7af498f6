"""What each attention backend is told of a packed batch: a block mask, a mask written out, or lengths.

**A FlexAttention block mask without the T x T work.** FlexAttention wants to know, for each block of queries, which
blocks of keys it must visit, and which of those are *full* (every pair allowed, so the kernel skips the mask function).
torch's `create_block_mask` evaluates the mask function for all T x T pairs and counts in each block: 67 million
evaluations at T = 8,192, for a mask that changes with every batch. The reaches of `_batch` give the same answer from
two numbers per block of queries, because reaches never fall along a row:

    a block of keys is visited  <=>  it lies in [reach of the block's first query, last query]
    a block of keys is full     <=>  it starts at or after the reach of the block's last query,
                                     and ends at or before the block's first query

What is left is a table of (T / block_size)^2 bools, 64 x 64 at T = 8,192. All eight tensors equal those of
`create_block_mask` entry for entry, unused ones included; `benchmarks/bench_masks.py` measures both (about 1,000 times
faster at T = 8,192 on a CPU).

**Masks written out**: one bool for each pair of positions, the form that every attention function understands, and the
reference for the others. The price is memory, B * T * T bytes: 67 MB for one row of 8,192 tokens. It is the only tensor
of that size made here; the triangle is cut into it in place. True means "may look", as in
`scaled_dot_product_attention`. `nn.MultiheadAttention` reads True as "may not look": hand it `~mask`.

**Lengths.** Variable-length kernels read a batch as one long line of B * T tokens and are told where each segment of it
starts: `cu_seqlens`. Nothing is computed here; the batch already carries the boundaries, and `max_seqlen` as a Python
int so that no kernel launch waits for the GPU. What differs between libraries is the spelling, and one thing more:
"causal" is a separate argument there, off by default. Left out, every token would see the rest of its document, and
training would look wonderful. So it travels with the boundaries. A row's padding tail is one segment of its own. Inside
it padding sees earlier padding, unlike in `dense`; no document sees it either way.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NotRequired, TypeAlias, TypedDict, get_args, overload

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from penstock.errors import check_choice
from penstock.masks._batch import Batch, as_tensor, integer, reach_of_documents, reach_of_starts, tensor
from penstock.masks._pictures import mrope_position_ids, picture_grids

_MaskMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

Kernel = Literal["flash_attn", "torch"]


def block_mask(batch: Batch, *, block_size: int = 128) -> BlockMask:
    """The mask of a packed batch for `flex_attention`, one for all heads, on the batch's device.

    The same rule as `dense`. Rows need not be a multiple of `block_size`, whose default is torch's.
    A mask belongs to its batch: make one per step, use it in every layer. A new mask of the same
    shape does not make `torch.compile` compile again.

    Raises:
        ValueError: the batch has no `document_ids`, they are not [B, T], or block_size is below 1.
        TypeError: they are not int32, or block_size is not an integer.
    """
    if not hasattr(block_size, "__index__"):
        raise TypeError(f"block_size is {block_size!r}; expected an int of at least 1.")
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}; expected at least 1.")
    reach = reach_of_documents(tensor(batch, "document_ids"))
    is_partial, is_full = _visited_blocks(reach, block_size)
    # The backward pass walks the same table by columns: the q_ tensors are those of its transpose.
    tables = torch.stack([is_partial, is_full, is_partial.mT, is_full.mT]).unsqueeze(2)
    counts, indices = _in_order(tables)
    return BlockMask(
        seq_lengths=(reach.shape[1], reach.shape[1]),
        kv_num_blocks=counts[0],
        kv_indices=indices[0],
        full_kv_num_blocks=counts[1],
        full_kv_indices=indices[1],
        q_num_blocks=counts[2],
        q_indices=indices[2],
        full_q_num_blocks=counts[3],
        full_q_indices=indices[3],
        BLOCK_SIZE=(block_size, block_size),
        mask_mod=_mask_mod(reach),
    )


def _visited_blocks(reach: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Which blocks of keys each block of queries sees in part and in full, bool [B, N, N] each."""
    length = reach.shape[1]
    first_reach = reach[:, ::block_size].unsqueeze(-1)
    last_reach = reach[:, block_size - 1 :: block_size].unsqueeze(-1)
    if length % block_size:
        # torch counts the missing end of a short last block as hidden, so no block is full in it.
        last_reach = torch.nn.functional.pad(last_reach, (0, 0, 0, 1), value=length)
    keys = torch.arange(0, length, block_size, dtype=torch.int32, device=reach.device)
    queries = keys.unsqueeze(-1)
    is_visited = (first_reach < keys + block_size) & (keys <= queries)
    is_full = (last_reach <= keys) & (keys + (block_size - 1) <= queries)
    return is_visited & ~is_full, is_full


def _in_order(tables: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks each row of the tables marks, and their numbers, marked ones first."""
    counts = tables.sum(dim=-1, dtype=torch.int32)
    indices = torch.argsort(tables.to(torch.uint8), dim=-1, descending=True, stable=True)
    return counts, indices.to(torch.int32)


def _mask_mod(reach: Tensor) -> _MaskMod:
    """The rule for one pair. One load per query; comparing document ids would take a second per key."""

    def sees(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (reach[b, q_idx] <= kv_idx) & (kv_idx <= q_idx)

    return sees


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


class _FlashAttn(TypedDict):
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    causal: bool


class _TorchVarlen(TypedDict):
    cu_seq_q: Tensor
    cu_seq_k: Tensor
    max_q: int
    max_k: int
    window_size: tuple[int, int]


class _HuggingFace(TypedDict):
    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    cu_seq_lens_q: Tensor
    cu_seq_lens_k: Tensor
    max_length_q: int
    max_length_k: int
    use_cache: bool
    pixel_values: NotRequired[Tensor]
    image_grid_thw: NotRequired[Tensor]


@overload
def varlen(batch: Batch, *, kernel: Literal["flash_attn"] = "flash_attn") -> _FlashAttn: ...
@overload
def varlen(batch: Batch, *, kernel: Literal["torch"]) -> _TorchVarlen: ...
def varlen(batch: Batch, *, kernel: Kernel = "flash_attn") -> _FlashAttn | _TorchVarlen:
    """Keyword arguments for variable-length attention over queries, keys and values [B * T, H, D].

    `"flash_attn"` spells them for `flash_attn.flash_attn_varlen_func`, `"torch"` for
    `torch.nn.attention.varlen.varlen_attn` of torch 2.12 and later (2.10 had `is_causal` in place
    of `window_size`, and refuses the call).

    Raises:
        ValueError: `cu_seqlens` or `max_seqlen` is missing, or `cu_seqlens` is not [S + 1].
        TypeError: `cu_seqlens` is not int32, or `max_seqlen` not a Python int.

    >>> import numpy as np
    >>> batch = {"cu_seqlens": np.array([0, 3, 4], dtype=np.int32), "max_seqlen": 3}
    >>> varlen(batch)["max_seqlen_q"], varlen(batch)["causal"]
    (3, True)
    """
    check_choice("kernel", kernel, get_args(Kernel))
    starts, longest = tensor(batch, "cu_seqlens"), integer(batch, "max_seqlen")
    if kernel == "torch":
        # (-1, 0): any distance back, nothing ahead. torch's own spelling of causal.
        return _TorchVarlen(cu_seq_q=starts, cu_seq_k=starts, max_q=longest, max_k=longest, window_size=(-1, 0))
    return _FlashAttn(cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=longest, max_seqlen_k=longest, causal=True)


def hugging_face_kwargs(batch: Batch, *, image_token_id: int | None = None, merge_size: int = 2) -> _HuggingFace:
    """Keyword arguments for a transformers model, whatever its attention: `model(**kwargs)`.

    The rows are laid end to end as one of shape [1, B * T], because transformers takes a batch of
    several packed rows for unpacked ones, and lets documents see each other. There is no
    `attention_mask`, because its presence turns packing off. The four boundary arguments are for
    FlashAttention and work together: with one missing, boundaries are guessed from `position_ids`.
    The other backends always read them from there, but only in a model without a cache, which is
    why `use_cache=False` is among them. Some architectures (OPT, BLOOM, Falcon, MPT, gpt-oss, Mamba, LFM2) never look:
    `check_isolation` tells.

    transformers shifts labels itself, so pack with `labels="same"`.

    Args:
        batch: A packed batch.
        image_token_id: For Qwen-VL: the token that stands for a part of a picture. The positions are then four, those
            of the text and `mrope_position_ids`, and the batch's `pixel_values` and `image_grid_thw` come along.
        merge_size: Patches of a side that become one token.

    Raises:
        ValueError: an entry is missing or has another shape.
        TypeError: an entry has another dtype, or `max_seqlen` is not a Python int.
    """
    starts, longest = tensor(batch, "cu_seqlens"), integer(batch, "max_seqlen")
    given = _HuggingFace(
        input_ids=_flat(batch, "input_ids"),
        labels=_flat(batch, "labels"),
        position_ids=_flat(batch, "position_ids"),
        cu_seq_lens_q=starts,
        cu_seq_lens_k=starts,
        max_length_q=longest,
        max_length_k=longest,
        use_cache=False,
    )
    if image_token_id is not None:
        places = mrope_position_ids(batch, image_token_id, merge_size=merge_size).reshape(3, 1, -1)
        given["position_ids"] = torch.cat([given["position_ids"][None], places])
        grids = picture_grids(batch)
        if len(grids):
            given["image_grid_thw"] = grids
            given["pixel_values"] = as_tensor(batch.get("pixel_values"), "batch['pixel_values']", "expected a tensor.")
    return given


def check_isolation(
    model: Callable[..., Any], batch: Batch, *, image_token_id: int | None = None, merge_size: int = 2
) -> None:
    """Change a document and check that no other document's logits change: once, before a long run.

    `model(**hugging_face_kwargs(batch))` runs twice, in eval mode and without gradients; compare on the
    device and with the attention you train with. This waits for the GPU.

    A mixture of experts computes the tokens of all documents in groups, so that others differ in their last bits. Where
    logits differ, the model therefore runs once more: only what a gradient flows back from depends on the document.

    With `image_token_id`, as in `hugging_face_kwargs`, the document that changes is the first one that has a picture,
    and the picture changes, too.

    Raises:
        RuntimeError: documents see each other, so this model must not be trained on packed rows.
        ValueError: the batch holds fewer than two documents, so there is nothing to compare.
    """
    kwargs = hugging_face_kwargs(batch, image_token_id=image_token_id, merge_size=merge_size)
    documents = tensor(batch, "document_ids").reshape(-1).to(kwargs["input_ids"].device)
    is_picture = (kwargs["input_ids"][0] == image_token_id) & (documents >= 0)
    chosen = documents[is_picture.to(torch.uint8).argmax()]  # the first of the batch, if none has a picture
    is_first, is_other = documents == chosen, (documents != chosen) & (documents >= 0)
    if not is_other.any():
        raise ValueError("the batch holds one document; expected two or more, to see whether one changes another.")
    tokens, is_text = kwargs["input_ids"].clone(), is_first & ~is_picture
    tokens[0, is_text] = (tokens[0, is_text] == 0).to(tokens.dtype)  # to the last: a convolution looks back over a few
    changed: dict[str, Any] = {**kwargs, "input_ids": tokens}
    if is_picture.any():
        end = int((is_picture & is_first).sum()) * merge_size**2
        pixels = kwargs["pixel_values"].clone()
        pixels[:end] += 1
        changed["pixel_values"] = pixels
    with _evaluating(model):
        with torch.no_grad():
            before, after = model(**kwargs).logits, model(**changed).logits
        num_changed = int((before != after).any(dim=-1)[0, is_other].sum())
        is_rounding = num_changed and not _depends(model, kwargs, is_first, is_other)
    if num_changed and not is_rounding:
        raise RuntimeError(
            f"other tokens in one document of the batch changed the logits of {num_changed} tokens of others, of "
            f"{int(is_other.sum())}: {type(model).__name__} does not keep packed documents apart. Use another "
            "attention implementation or model, or train on rows of one document each."
        )


def _depends(model: Callable[..., Any], kwargs: Mapping[str, object], is_first: Tensor, is_other: Tensor) -> bool:
    """Whether a gradient flows from the logits of others to the first document; True if the model cannot say.

    Attention that is masked has a weight of exactly zero, and so has its gradient.
    """
    find = getattr(getattr(model, "module", model), "get_input_embeddings", None)
    if find is None:
        return True
    given: list[Tensor] = []

    def watch(_module: object, _inputs: object, output: Tensor) -> Tensor:
        given.append(output.detach().requires_grad_())
        return given[-1].clone()  # some models change it in place

    handle = find().register_forward_hook(watch)
    try:
        with torch.enable_grad():
            total = model(**kwargs).logits[0, is_other].float().square().sum()
            (gradient,) = torch.autograd.grad(total, given[:1])
    except NotImplementedError:  # no backward pass: FlexAttention on a CPU
        return True
    finally:
        handle.remove()
    return bool(gradient[0, is_first].any())


@contextlib.contextmanager
def _evaluating(model: Callable[..., Any]) -> Iterator[None]:
    was_training = getattr(model, "training", False)
    try:
        if was_training:
            model.eval()  # type: ignore[attr-defined]
        yield
    finally:
        if was_training:
            model.train()  # type: ignore[attr-defined]


def _flat(batch: Batch, key: str) -> Tensor:
    return tensor(batch, key).reshape(1, -1)

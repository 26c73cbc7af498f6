"""Boundaries for attention that takes lengths instead of a mask.

Variable-length kernels read a batch as one long line of B * T tokens and are told where each
segment of it starts: `cu_seqlens`. Nothing is computed here; the batch already carries the
boundaries, and `max_seqlen` as a Python int so that no kernel launch waits for the GPU. What
differs between libraries is the spelling, and one thing more: "causal" is a separate argument
there, off by default. Left out, every token would see the rest of its document, and training
would look wonderful. So it travels with the boundaries.

A row's padding tail is one segment of its own. Inside it padding sees earlier padding, unlike in
`dense`; no document sees it either way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypedDict, get_args, overload

import torch
from torch import Tensor

from penstock.errors import check_choice
from penstock.masks._batch import Batch, integer, tensor

Kernel = Literal["flash_attn", "torch"]


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


def hugging_face_kwargs(batch: Batch) -> _HuggingFace:
    """Keyword arguments for a transformers model, whatever its attention: `model(**kwargs)`.

    The rows are laid end to end as one of shape [1, B * T], because transformers takes a batch of
    several packed rows for unpacked ones, and lets documents see each other. There is no
    `attention_mask`, because its presence turns packing off. The four boundary arguments are for
    FlashAttention and work together: with one missing, boundaries are guessed from `position_ids`.
    The other backends always read them from there, but only in a model without a cache, which is
    why `use_cache=False` is among them. Some architectures (OPT, BLOOM, Falcon, MPT, gpt-oss, Mamba, LFM2) never look:
    `check_isolation` tells.

    transformers shifts labels itself, so pack with `labels="same"`.

    Raises:
        ValueError: an entry is missing or has another shape.
        TypeError: an entry has another dtype, or `max_seqlen` is not a Python int.
    """
    starts, longest = tensor(batch, "cu_seqlens"), integer(batch, "max_seqlen")
    return _HuggingFace(
        input_ids=_flat(batch, "input_ids"),
        labels=_flat(batch, "labels"),
        position_ids=_flat(batch, "position_ids"),
        cu_seq_lens_q=starts,
        cu_seq_lens_k=starts,
        max_length_q=longest,
        max_length_k=longest,
        use_cache=False,
    )


def check_isolation(model: Callable[..., Any], batch: Batch) -> None:
    """Change a document and check that no other document's logits change: once, before a long run.

    `model(**hugging_face_kwargs(batch))` runs twice, in eval mode and without gradients; compare on the
    device and with the attention you train with. This waits for the GPU.

    A mixture of experts computes the tokens of all documents in groups, so that others differ in their last bits. Where
    logits differ, the model therefore runs once more: only what a gradient flows back from depends on the document.

    Raises:
        RuntimeError: documents see each other, so this model must not be trained on packed rows.
        ValueError: the batch holds fewer than two documents, so there is nothing to compare.
    """
    kwargs = hugging_face_kwargs(batch)
    documents = tensor(batch, "document_ids").reshape(-1).to(kwargs["input_ids"].device)
    is_first, is_other = documents == documents[0], (documents != documents[0]) & (documents >= 0)
    if not is_other.any():
        raise ValueError("the batch holds one document; expected two or more, to see whether one changes another.")
    changed = kwargs["input_ids"].clone()  # to its last token: a convolution looks back over a few only
    changed[0, is_first] = (changed[0, is_first] == 0).to(changed.dtype)
    with _evaluating(model):
        with torch.no_grad():
            before, after = model(**kwargs).logits, model(**{**kwargs, "input_ids": changed}).logits
        num_changed = int((before != after).any(dim=-1)[0, is_other].sum())
        is_rounding = num_changed and not _depends(model, kwargs, is_first, is_other)
    if num_changed and not is_rounding:
        raise RuntimeError(
            f"other tokens in the batch's first document changed the logits of {num_changed} tokens of others, of "
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

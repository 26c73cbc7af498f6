"""One attention layer over packed rows, with `packed=True` to keep documents apart.

A packed row holds several documents, and a token should see only its own. `from_token` finds the
boundaries from the EOS token; when the batch comes from a Penstock plan, `dense(batch)` knows them
and is handed over as `visible`. Two things are easy to get wrong here:

- `nn.MultiheadAttention` reads True as "may not look", while the masks of `penstock.masks` and of
  `scaled_dot_product_attention` say True for "may look". Hence the `~` below. Without it a token
  sees everything except its own document's past: other documents, and the very token that it
  should predict. Nothing fails.
- The mask must be made where the tokens are. `from_token` and `dense` do that, so this module
  works unchanged on a GPU.

Run it: `python examples/packed_attention.py`
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penstock import masks


class PackedAttention(nn.Module):
    """Embeds tokens and lets each attend to the earlier tokens of its own document."""

    def __init__(self, vocab_size: int, embedding_dim: int, *, num_heads: int, eos_token_id: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, embedding_dim)
        self.attention = nn.MultiheadAttention(embedding_dim, num_heads, batch_first=True)
        self.eos_token_id = eos_token_id

    def forward(self, tokens: Tensor, packed: bool = True, visible: Tensor | None = None) -> Tensor:
        """Outputs [B, T, embedding_dim] for tokens [B, T].

        `visible` is a mask from `masks.dense(batch)`; without it EOS tokens mark the boundaries.
        With `packed=False` each row counts as one document.
        """
        if visible is None:
            visible = masks.from_token(tokens, self.eos_token_id) if packed else _causal(tokens)
        embedded = self.embedding(tokens)
        # One [T, T] mask per row and head, in the order rows, then heads.
        hidden = (~visible).repeat_interleave(self.attention.num_heads, dim=0)
        output, _ = self.attention(embedded, embedded, embedded, attn_mask=hidden, need_weights=False)
        return output


def _causal(tokens: Tensor) -> Tensor:
    rows, length = tokens.shape
    return torch.ones(rows, length, length, dtype=torch.bool, device=tokens.device).tril()


def main() -> None:
    """Change one token of the first of three documents, and print which documents notice."""
    torch.manual_seed(0)
    model = PackedAttention(vocab_size=100, embedding_dim=32, num_heads=4, eos_token_id=0).eval()
    tokens = torch.tensor([[11, 12, 0, 21, 22, 23, 0, 31, 0]])
    changed = tokens.clone()
    changed[0, 1] = 99
    for packed in (False, True):
        with torch.inference_mode():
            differs = (model(tokens, packed) != model(changed, packed)).any(dim=-1)[0]
        noticed = [name for name, part in zip("ABC", differs.split([3, 4, 2]), strict=True) if part.any()]
        print(f"packed={packed!s:5}  document A changed; outputs changed in: {', '.join(noticed)}")


if __name__ == "__main__":
    main()

"""What every aggregator takes and gives.

    aggregator(h_BMD, mask_BM, labels_B=..., generator=...) -> Pooled

Shapes: B bags, M tokens (patches or slots), D width, C outputs of the head (classes, time bins, or one risk), K further
answers. The result of a bag depends neither on the other bags of its batch nor on padding; masked tokens must be finite.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pooled:
    """vector        (B, out_dim), or one vector an output (B, C, D)
    attention     (B, M), or one an output (B, C, M): the share of each token, summing to 1 over a bag's real tokens
    side_logits   (B, K, C) or None: further answers that the bag's label supervises in training; side_mask (B, K) says
                  which of them exist
    losses        scalar terms to add to the bag's loss, weighted as published
    """

    vector: Tensor
    attention: Tensor
    side_logits_BKC: Tensor | None = None
    side_mask_BK: Tensor | None = None
    losses: dict[str, Tensor] = field(default_factory=dict)


def real_tokens(h_BMD: Tensor, mask_BM: Tensor | None) -> Tensor:
    """The mask, or all True where there is none."""
    return h_BMD.new_ones(h_BMD.shape[:2], dtype=torch.bool) if mask_BM is None else mask_BM


def masked_softmax(logits: Tensor, mask: Tensor, dim: int = -1) -> Tensor:
    """Softmax over the real entries in at least float32, in the dtype of `logits`; all zeros where nothing is real."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    wide = wide.masked_fill(~mask, torch.finfo(wide.dtype).min)
    return (wide.softmax(dim) * mask).to(logits.dtype)


def take(h_BMD: Tensor, index_BK: Tensor) -> Tensor:
    """Tokens `index` of each bag: (B, K, D)."""
    return h_BMD.gather(1, index_BK[..., None].expand(-1, -1, h_BMD.shape[-1]))

"""A learned graph over the tokens, then gated attention (after Li et al., CVPR 2024, WiKG).

Shapes: B bags, M tokens, D width, K neighbours.
"""

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from mammoth_path.model.aggregators.abmil import GatedAttention
from mammoth_path.model.aggregators.base import Pooled, masked_softmax, real_tokens, take

CHUNK = 2048  # tokens whose similarities to all others are held at once


class WiKG(nn.Module):
    """Every token has a head and a tail embedding; its `neighbours` are the tokens whose tails fit its head best. What it
    hears from them is weighed by how well each edge fits, and joined to it by sum and product. The graph is made of
    features alone: no position enters, so slots can be its nodes. Similarities are never stored for all pairs."""

    def __init__(
        self, dim: int, outputs: int, *, neighbours: int = 4, width: int = 384, dropout: float = 0.25
    ):
        super().__init__()
        self.out_dim, self.neighbours = dim, neighbours
        self.head, self.tail = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.by_sum, self.by_product = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(dim)
        self.pool = GatedAttention(dim, outputs, width=width, dropout=dropout)

    def forward(self, h_BMD: Tensor, mask_BM: Tensor | None = None, **_) -> Pooled:
        real = real_tokens(h_BMD, mask_BM)
        head, tail = self.head(h_BMD), self.tail(h_BMD)
        index_BMK, there_BMK = self._nearest(head, tail, real)
        near_BMKD = take(tail, index_BMK.flatten(1)).unflatten(1, index_BMK.shape[1:])
        fit_BMK = torch.einsum("bmd,bmkd->bmk", head, near_BMKD) / head.shape[-1] ** 0.5
        weight = masked_softmax(fit_BMK, there_BMK)[..., None]
        edge = weight * near_BMKD + (1 - weight) * head[:, :, None]
        gate = torch.tanh(head[:, :, None] + edge)
        heard = masked_softmax((near_BMKD * gate).sum(-1) / head.shape[-1] ** 0.5, there_BMK)
        message = torch.einsum("bmk,bmkd->bmd", heard, near_BMKD)
        joined = nnf.leaky_relu(self.by_sum(head + message)) + nnf.leaky_relu(self.by_product(head * message))
        return self.pool(self.norm(self.dropout(joined)), real)

    @torch.no_grad()
    def _nearest(self, head: Tensor, tail: Tensor, real_BM: Tensor) -> tuple[Tensor, Tensor]:
        """Index of each token's neighbours (B, M, K) and which of them exist (a small bag has fewer than K)."""
        k = min(self.neighbours, head.shape[1])
        parts = []
        for part in head.split(CHUNK, 1):
            fit = (part @ tail.mT).masked_fill(~real_BM[:, None], float("-inf"))
            parts.append(fit.topk(k, dim=-1).indices)
        index = torch.cat(parts, 1)
        there = real_BM.gather(1, index.flatten(1)).view_as(index)
        return index, there

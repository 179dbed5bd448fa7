"""From tokens to one vector a bag, with the share of each token.

Shapes: B bags, M tokens (patches or slots), D width. Attention (B, M) sums to 1 over the real tokens.
"""

import torch
from torch import Tensor, nn

from mammoth_path.errors import ConfigError


class MeanPool(nn.Module):
    """The mean of the real tokens; each has the same share."""

    def forward(self, h_BMD: Tensor, mask_BM: Tensor | None = None) -> tuple[Tensor, Tensor]:
        B, M, _ = h_BMD.shape
        real = h_BMD.new_ones(B, M) if mask_BM is None else mask_BM.to(h_BMD.dtype)
        attention = real / real.sum(1, keepdim=True)
        return torch.einsum("bm,bmd->bd", attention, h_BMD), attention


class MaxPool(nn.Module):
    """The largest value of each feature; a token's share is the share of features that it supplies."""

    def forward(self, h_BMD: Tensor, mask_BM: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if mask_BM is not None:
            h_BMD = h_BMD.masked_fill(~mask_BM[..., None], float("-inf"))
        pooled, winner = h_BMD.max(1)
        share = h_BMD.new_zeros(h_BMD.shape[:2])
        share = share.scatter_add(1, winner, torch.full_like(pooled, 1 / pooled.shape[1]).detach())
        return pooled, share


class GatedAttention(nn.Module):
    """ABMIL with gated attention (Ilse et al. 2018)."""

    def __init__(
        self, dim: int, *, width: int = 384, dropout: float = 0.25, generator: torch.Generator | None = None
    ):
        super().__init__()
        self.value, self.gate, self.score = nn.Linear(dim, width), nn.Linear(dim, width), nn.Linear(width, 1)
        self.dropout = nn.Dropout(dropout)
        for layer in (self.value, self.gate, self.score):
            nn.init.xavier_uniform_(layer.weight, generator=generator)
            nn.init.zeros_(layer.bias)

    def forward(self, h_BMD: Tensor, mask_BM: Tensor | None = None) -> tuple[Tensor, Tensor]:
        hidden = self.dropout(torch.tanh(self.value(h_BMD))) * self.dropout(torch.sigmoid(self.gate(h_BMD)))
        logits = self.score(hidden)[..., 0].to(torch.promote_types(h_BMD.dtype, torch.float32))
        if mask_BM is not None:
            logits = logits.masked_fill(~mask_BM, float("-inf"))
        attention = logits.softmax(1).to(h_BMD.dtype)
        return torch.einsum("bm,bmd->bd", attention, h_BMD), attention


AGGREGATORS = ("mean", "max", "abmil")


def build_aggregator(
    name: str, dim: int, *, dropout: float = 0.25, generator: torch.Generator | None = None
) -> nn.Module:
    """mean, max or abmil. Raises `ConfigError` for another name."""
    if name == "mean":
        return MeanPool()
    if name == "max":
        return MaxPool()
    if name == "abmil":
        return GatedAttention(dim, dropout=dropout, generator=generator)
    raise ConfigError(f"aggregator={name!r}; there are: {', '.join(AGGREGATORS)}")

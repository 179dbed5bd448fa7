"""ILRA-MIL (Xiang & Zhang, ICLR 2023): tokens talk through a few latent vectors, so that a bag's matrix stays low-rank.

Shapes: B bags, M tokens, D width, L latents, H heads.
"""

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from mammoth_path.errors import ConfigError
from mammoth_path.model.aggregators.base import Pooled, masked_softmax, real_tokens


class GatedCrossAttention(nn.Module):
    """Queries look at keys; what they see is gated by the query itself and added to it, then a small MLP."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query_norm, self.key_norm, self.out_norm = (nn.LayerNorm(dim) for _ in range(3))
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))
        self.gate, self.out = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.ReLU())

    def _split(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def weights(self, q_BTD: Tensor, k_BMD: Tensor, mask_BM: Tensor) -> Tensor:
        """Attention (B, T, M), mean over heads."""
        query = self._split(self.query(self.query_norm(q_BTD)))
        key = self._split(self.key(self.key_norm(k_BMD)))
        return masked_softmax(query @ key.mT / query.shape[-1] ** 0.5, mask_BM[:, None, None]).mean(1)

    def forward(self, q_BTD: Tensor, k_BMD: Tensor, mask_BM: Tensor | None = None) -> Tensor:
        queries, keys = self.query_norm(q_BTD), self.key_norm(k_BMD)
        seen = nnf.scaled_dot_product_attention(
            self._split(self.query(queries)),
            self._split(self.key(keys)),
            self._split(self.value(keys)),
            attn_mask=None if mask_BM is None else mask_BM[:, None, None],
        )
        seen = seen.transpose(1, 2).flatten(2)
        y = q_BTD + self.out(seen * nnf.silu(self.gate(queries)))
        return y + self.mlp(self.out_norm(y))


class ILRA(nn.Module):
    """`layers` rounds of tokens -> latents -> tokens, then one learned seed pools. A token's share is the seed's
    attention to it, mean over heads."""

    def __init__(self, dim: int, outputs: int, *, layers: int = 2, heads: int = 8, latents: int = 64):
        super().__init__()
        if dim % heads:
            raise ConfigError(f"heads={heads} does not divide dim={dim}")
        self.out_dim = dim
        self.latents = nn.ParameterList(nn.Parameter(torch.empty(latents, dim)) for _ in range(layers))
        self.gather = nn.ModuleList(GatedCrossAttention(dim, heads) for _ in range(layers))
        self.spread = nn.ModuleList(GatedCrossAttention(dim, heads) for _ in range(layers))
        self.seed = nn.Parameter(torch.empty(1, dim))
        self.pool = GatedCrossAttention(dim, heads)

    def forward(self, h_BMD: Tensor, mask_BM: Tensor | None = None, **_) -> Pooled:
        real = real_tokens(h_BMD, mask_BM)
        for latents, gather, spread in zip(self.latents, self.gather, self.spread, strict=True):
            seen = gather(latents.expand(len(h_BMD), -1, -1), h_BMD, real)
            h_BMD = spread(h_BMD, seen)
        seed = self.seed.expand(len(h_BMD), -1, -1)
        vector = self.pool(seed, h_BMD, real)[:, 0]
        with torch.no_grad():
            attention = self.pool.weights(seed, h_BMD, real)[:, 0]
        return Pooled(vector, attention)

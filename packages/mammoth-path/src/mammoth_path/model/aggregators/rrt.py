"""Re-embedding by a regional transformer, then gated attention (after Tang et al., CVPR 2024, RRT-MIL).

Shapes: B bags, M tokens, D width, G regions, R cells a region, H heads, K representatives a region.
"""

import torch.nn.functional as nnf
from torch import Tensor, nn

from mammoth_path.errors import ConfigError
from mammoth_path.model.aggregators.abmil import GatedAttention
from mammoth_path.model.aggregators.base import Pooled, masked_softmax, real_tokens
from mammoth_path.model.aggregators.order import gather_cells, pack, scatter_cells, square_places, unpack


class SelfAttention(nn.Module):
    """Multi-head self-attention over (N, T, D) with a mask (N, T); with `kernel`, a depth-wise convolution of the values
    along T is added, which tells neighbours apart."""

    def __init__(self, dim: int, heads: int, kernel: int = 0):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.local = nn.Conv1d(dim, dim, kernel, padding=kernel // 2, groups=dim) if kernel else None

    def forward(self, x_NTD: Tensor, real_NT: Tensor) -> Tensor:
        q, k, v = self.qkv(x_NTD).masked_fill(~real_NT[..., None], 0).chunk(3, dim=-1)
        keys = real_NT | ~real_NT.any(1, keepdim=True)  # a region without tokens attends to its zeros
        heads = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        y = nnf.scaled_dot_product_attention(*heads, attn_mask=keys[:, None, None]).transpose(1, 2).flatten(2)
        return self.out(y if self.local is None else y + self.local(v.mT).mT)


class RRT(nn.Module):
    """The bag's tokens fill a square row by row, cut into `regions` x `regions` regions. `layers` rounds of attention
    within each region, then one across regions between `representatives` learned means of each. Depends on the order of
    the tokens. Unlike the published code, positions enter through the values, so that no attention matrix is stored.
    """

    ordered = True

    def __init__(
        self,
        dim: int,
        outputs: int,
        *,
        regions: int = 8,
        layers: int = 2,
        heads: int = 8,
        representatives: int = 3,
        kernel: int = 15,
        width: int = 384,
        dropout: float = 0.25,
    ):
        super().__init__()
        if dim % heads:
            raise ConfigError(f"heads={heads} does not divide dim={dim}")
        self.out_dim, self.regions = dim, regions
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(layers))
        self.within = nn.ModuleList(SelfAttention(dim, heads, kernel) for _ in range(layers))
        self.across_norm, self.last_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.choose = nn.Linear(dim, representatives, bias=False)
        self.across = SelfAttention(dim, heads)
        self.pool = GatedAttention(dim, outputs, width=width, dropout=dropout)

    def forward(self, h_BMD: Tensor, mask_BM: Tensor | None = None, **_) -> Pooled:
        h, real, index = pack(h_BMD, real_tokens(h_BMD, mask_BM))
        cell, size = self._cells(real)
        count = self.regions**2 * size
        filled_NR = scatter_cells(real[..., None].to(h.dtype), cell, real, count)[..., 0] > 0
        filled_NR = filled_NR.reshape(-1, size)

        def regions(x_BMD: Tensor) -> Tensor:
            return scatter_cells(x_BMD, cell, real, count).reshape(-1, size, x_BMD.shape[-1])

        def tokens(x_NRD: Tensor) -> Tensor:
            return gather_cells(x_NRD.reshape(len(h), count, -1), cell, real)

        for norm, attention in zip(self.norms, self.within, strict=True):
            h = h + tokens(attention(regions(norm(h)), filled_NR))
        h = h + tokens(self._across(regions(self.across_norm(h)), filled_NR, len(h)))
        pooled = self.pool(self.last_norm(h), real)
        return Pooled(pooled.vector, unpack(pooled.attention, index))

    def _cells(self, real_BM: Tensor) -> tuple[Tensor, int]:
        """Each packed token's cell, region by region, and the cells that a region has (of the largest bag)."""
        row, column, side = square_places(real_BM)
        edge = (side + self.regions - 1) // self.regions
        size = int(edge.max()) ** 2
        region = row // edge * self.regions + column // edge
        return region * size + row % edge * edge + column % edge, size

    def _across(self, x_NRD: Tensor, filled_NR: Tensor, bags: int) -> Tensor:
        logits_NKR = self.choose(x_NRD).mT
        means_NKD = masked_softmax(logits_NKR, filled_NR[:, None]) @ x_NRD
        means = means_NKD.unflatten(0, (bags, -1)).transpose(1, 2).flatten(0, 1)
        some = filled_NR.any(1).view(bags, 1, -1).expand(-1, means_NKD.shape[1], -1).flatten(0, 1)
        mixed = self.across(means, some).unflatten(0, (bags, -1)).transpose(1, 2).flatten(0, 1)
        return logits_NKR.softmax(1).mT @ mixed

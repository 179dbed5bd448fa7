"""TransMIL (Shao et al., NeurIPS 2021): a class token, Nyström attention and convolutions over the bag as a square.

Shapes: B bags, M tokens, T = M + 1, D width.
"""

import torch
from torch import Tensor, nn

from mammoth_path.model.aggregators.base import Pooled, real_tokens
from mammoth_path.model.aggregators.nystrom import NystromAttention
from mammoth_path.model.aggregators.order import gather_cells, pack, scatter_cells, square_places, unpack


class SquareConvolutions(nn.Module):
    """Position encoding (PPEG): depth-wise 7, 5 and 3 px convolutions over the square that the bag's tokens fill row by
    row. What is left of the last rows stays empty; the published code repeats the first patches there."""

    def __init__(self, dim: int):
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv2d(dim, dim, size, padding=size // 2, groups=dim) for size in (7, 5, 3)
        )

    def forward(self, h_BMD: Tensor, real_BM: Tensor) -> Tensor:
        row, column, side = square_places(real_BM)
        widest = int(side.max())
        cell = row * widest + column
        grid = scatter_cells(h_BMD, cell, real_BM, widest * widest).mT.unflatten(-1, (widest, widest))
        mixed = grid + torch.stack([c(grid) for c in self.convolutions]).sum(0)
        return gather_cells(mixed.flatten(2).mT, cell, real_BM)


class TransMIL(nn.Module):
    """Depends on the order of the tokens. A token's share is the class token's attention in the last layer, mean over
    heads, its approximation errors below 0 cut off; it tells where the model looked last, not what it used."""

    ordered = True

    def __init__(self, dim: int, outputs: int, *, heads: int = 4, landmarks: int = 64):
        super().__init__()
        self.out_dim = dim
        self.class_token = nn.Parameter(torch.empty(1, dim))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(3))
        self.attentions = nn.ModuleList(
            NystromAttention(dim, heads=heads, landmarks=landmarks) for _ in range(2)
        )
        self.places = SquareConvolutions(dim)

    def forward(self, h_BMD: Tensor, mask_BM: Tensor | None = None, **_) -> Pooled:
        h, real, index = pack(h_BMD, real_tokens(h_BMD, mask_BM))
        x = torch.cat([self.class_token.expand(len(h), 1, -1), h], 1)
        real_BT = torch.cat([real.new_ones(len(h), 1), real], 1)
        x = x + self.attentions[0](self.norms[0](x), real_BT)[0]
        x = torch.cat([x[:, :1], self.places(x[:, 1:], real)], 1)
        change, first_BT = self.attentions[1](self.norms[1](x), real_BT)
        vector = self.norms[2](x + change)[:, 0]
        share = first_BT[:, 1:].detach().clamp(min=0) * real
        total = share.sum(1, keepdim=True)
        share = torch.where(total > 0, share / total, real / real.sum(1, keepdim=True))
        return Pooled(vector, unpack(share, index))

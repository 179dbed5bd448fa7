"""Mean and max pooling. Shapes: B bags, M tokens, D width."""

import torch
from torch import Tensor, nn

from mammoth_path.model.aggregators.base import Pooled, real_tokens


class MeanPool(nn.Module):
    """The mean of the real tokens; each has the same share."""

    def __init__(self, dim: int, outputs: int):
        super().__init__()
        self.out_dim = dim

    def forward(self, h_BMD: Tensor, mask_BM: Tensor | None = None, **_) -> Pooled:
        real = real_tokens(h_BMD, mask_BM).to(h_BMD.dtype)
        attention = real / real.sum(1, keepdim=True)
        return Pooled(torch.einsum("bm,bmd->bd", attention, h_BMD), attention)


class MaxPool(nn.Module):
    """The largest value of each feature; a token's share is the share of features that it supplies."""

    def __init__(self, dim: int, outputs: int):
        super().__init__()
        self.out_dim = dim

    def forward(self, h_BMD: Tensor, mask_BM: Tensor | None = None, **_) -> Pooled:
        real = real_tokens(h_BMD, mask_BM)
        pooled, winner = h_BMD.masked_fill(~real[..., None], float("-inf")).max(1)
        share = h_BMD.new_zeros(h_BMD.shape[:2])
        share = share.scatter_add(1, winner, torch.full_like(pooled, 1 / pooled.shape[1]).detach())
        return Pooled(pooled, share)

"""Nyström attention (Xiong et al., AAAI 2021) on packed sequences, each bag by its own length.

Shapes: B bags, T tokens, D width, H heads, P = D/H, L landmarks.
"""

import torch
from torch import Tensor, nn

from mammoth_path.errors import ConfigError
from mammoth_path.model.aggregators.base import masked_softmax


class NystromAttention(nn.Module):
    """softmax(QK^T) V through at most `landmarks` segment means: cost grows with T, not T². A sequence no longer than
    `landmarks` is its own landmarks, which makes the attention exact up to the iterated pseudo-inverse.

    Every bag has its own segments, and every matrix its own start of the iteration, so bags do not disturb each other.
    A depth-wise convolution of the values along the sequence is added, as published.
    """

    def __init__(
        self, dim: int, *, heads: int = 8, landmarks: int = 64, iterations: int = 6, kernel: int = 33
    ):
        super().__init__()
        if dim % heads:
            raise ConfigError(f"heads={heads} does not divide dim={dim}")
        self.heads, self.landmarks, self.iterations = heads, landmarks, iterations
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.local = nn.Conv1d(dim, dim, kernel, padding=kernel // 2, groups=dim, bias=False)
        self.out = nn.Linear(dim, dim)

    def forward(self, x_BTD: Tensor, real_BT: Tensor) -> tuple[Tensor, Tensor]:
        """(y (B, T, D), the first token's attention (B, T), mean over heads; approximate, so it may be below 0)."""
        q, k, v = self.qkv(x_BTD).masked_fill(~real_BT[..., None], 0).chunk(3, dim=-1)
        local = self.local(v.mT).mT
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        q = q * q.shape[-1] ** -0.5
        segment_BT, some_BL = self._segments(real_BT)
        q_land, k_land = self._means(q, segment_BT), self._means(k, segment_BT)
        land = some_BL[:, None, None]
        from_land = masked_softmax(q @ k_land.mT, land)
        inner = masked_softmax(q_land @ k_land.mT, land) * land.mT
        to_tokens = masked_softmax(q_land @ k.mT, real_BT[:, None, None]) * land.mT
        middle = pseudo_inverse(inner, self.iterations)
        y = (from_land @ (middle @ (to_tokens @ v))).transpose(1, 2).flatten(2) + local
        first = (from_land[:, :, :1] @ middle @ to_tokens)[:, :, 0].mean(1)
        return self.out(y).masked_fill(~real_BT[..., None], 0), first

    def _segments(self, real_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Each token's segment (B, T), `landmarks` for masked tokens, and which segments hold a token (B, L)."""
        count = real_BT.sum(1, keepdim=True)
        rank = torch.arange(real_BT.shape[1], device=real_BT.device)[None]
        segment = torch.where(count > self.landmarks, rank * self.landmarks // count, rank)
        segment = torch.where(real_BT, segment, self.landmarks)
        some = torch.arange(self.landmarks, device=real_BT.device)[None] < count
        return segment, some

    def _means(self, x_BHTP: Tensor, segment_BT: Tensor) -> Tensor:
        B, H, _, P = x_BHTP.shape
        index = segment_BT[:, None, :, None].expand_as(x_BHTP)
        total = x_BHTP.new_zeros(B, H, self.landmarks + 1, P).scatter_add(2, index, x_BHTP)
        count = x_BHTP.new_zeros(B, self.landmarks + 1).scatter_add(
            1, segment_BT, torch.ones_like(segment_BT, dtype=x_BHTP.dtype)
        )
        return (total / count.clamp(min=1)[:, None, :, None])[:, :, : self.landmarks]


def pseudo_inverse(a: Tensor, iterations: int) -> Tensor:
    """Moore-Penrose inverse of each matrix (..., L, L) by the third-order iteration of Razavi et al. Rows and columns of
    zeros stay zeros."""
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    size = a.abs()
    scale = size.sum(-1).amax(-1) * size.sum(-2).amax(-1)
    z = a.mT / scale[..., None, None]
    for _ in range(iterations):
        az = a @ z
        z = 0.25 * z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az)))
    return z

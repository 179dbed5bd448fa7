"""Mini experts: one low-rank map a head, the first factor shared by all experts (MAMMOTH, Eq. 4).

Shapes: B batch, E experts, S slots an expert, H heads, P width in a head, R rank, Q width out of a head.
"""

import torch
from torch import Tensor, nn

from shared_moe.errors import InputError
from shared_moe.ops.lowrank import lowrank_experts


class LowRankExperts(nn.Module):
    """v = (u Φ_h + c_h) W_eh + b_eh. With `share_factors` Φ and c serve every expert."""

    def __init__(
        self,
        num_experts: int,
        heads: int,
        width_in: int,
        width_out: int,
        rank: int,
        *,
        share_factors: bool = True,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        if rank < 1:
            raise InputError(f"rank is {rank}; expected at least 1")
        owners = (heads,) if share_factors else (num_experts, heads)
        self.down = nn.Parameter(torch.empty(*owners, width_in, rank))
        self.down_bias = nn.Parameter(torch.zeros(*owners, rank))
        self.up = nn.Parameter(torch.empty(num_experts, heads, rank, width_out))
        self.up_bias = nn.Parameter(torch.zeros(num_experts, heads, width_out))
        nn.init.normal_(self.down, 0, width_in**-0.5, generator=generator)
        nn.init.normal_(self.up, 0, rank**-0.5, generator=generator)

    def forward(self, u_BHESP: Tensor) -> Tensor:
        """(B, H, E, S, P) -> (B, E, S, H, Q)."""
        return lowrank_experts(u_BHESP, self.down, self.down_bias, self.up, self.up_bias)

"""Adapter experts: small bottlenecks beside a frozen module. Shapes: T tokens, D width, R bottleneck, E experts."""

import torch

from shared_moe.experts.ffn import FFNExperts


class AdapterExperts(FFNExperts):
    """E bottleneck adapters (Houlsby et al. 2019), D -> R -> D, whose sum starts at zero.

    Add the result to a frozen module's output; until training moves `down_proj`, nothing changes.
    """

    def __init__(
        self,
        dim: int,
        bottleneck: int,
        num_experts: int,
        *,
        activation: str = "gelu",
        generator: torch.Generator | None = None,
    ):
        super().__init__(
            dim, bottleneck, num_experts, gated=False, activation=activation, generator=generator
        )
        torch.nn.init.zeros_(self.down_proj)

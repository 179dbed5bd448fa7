"""Adapter experts: small bottlenecks beside a frozen module. Shapes: T tokens, D width, R bottleneck, E experts."""

import torch
from torch import Tensor, nn

from shared_moe.experts.ffn import FFNExperts
from shared_moe.routing.routing import Routing


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
        out_dim: int | None = None,
        scale: float = 1.0,
        backend: str = "auto",
        generator: torch.Generator | None = None,
    ):
        super().__init__(
            dim,
            bottleneck,
            num_experts,
            gated=False,
            activation=activation,
            out_dim=out_dim,
            backend=backend,
            generator=generator,
        )
        self.scale = scale
        nn.init.zeros_(self.down_proj)

    def forward(self, x_TD: Tensor, routing: Routing) -> Tensor:
        """(T, D) -> (T, out_dim): scale times the weighted sum of each token's adapters."""
        return super().forward(x_TD, routing) * self.scale


class LoRAExperts(AdapterExperts):
    """E low-rank updates of one frozen linear map (Hu et al. 2021): y = Σ_k w_k (alpha / R) B_e A_e x."""

    def __init__(
        self,
        dim: int,
        rank: int,
        num_experts: int,
        *,
        out_dim: int | None = None,
        alpha: float | None = None,
        backend: str = "auto",
        generator: torch.Generator | None = None,
    ):
        super().__init__(
            dim,
            rank,
            num_experts,
            activation="identity",
            out_dim=out_dim,
            scale=1.0 if alpha is None else alpha / rank,
            backend=backend,
            generator=generator,
        )

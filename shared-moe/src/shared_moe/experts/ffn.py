"""Feed-forward experts with grouped weights. Shapes: T tokens, D width, F hidden width, E experts."""

import torch
from torch import Tensor, nn

from shared_moe.errors import InputError
from shared_moe.ops.activations import check_activation
from shared_moe.ops.grouped_ffn import grouped_ffn
from shared_moe.routing.routing import Routing


class FFNExperts(nn.Module):
    """E feed-forward networks: SwiGLU when gated (the default), else two matrices and an activation.

    Weights lie as in transformers 5: gate_up_proj (E, 2F, D), gate rows first, and down_proj (E, D, F). Each
    expert maps to `out_dim`, by default back to `dim`. `activation` as in `ops.grouped_ffn`; with "gpt_oss" and bias
    it is the gpt-oss expert.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        num_experts: int,
        *,
        gated: bool = True,
        activation: str = "silu",
        bias: bool = False,
        out_dim: int | None = None,
        backend: str = "auto",
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        check_activation(activation, gated)
        out_dim = dim if out_dim is None else out_dim
        if min(dim, hidden, num_experts, out_dim) < 1:
            raise InputError(
                f"dim={dim}, hidden={hidden}, num_experts={num_experts}, out_dim={out_dim}; expected at least 1 each"
            )
        self.gated, self.activation, self.backend = gated, activation, backend
        rows = 2 * hidden if gated else hidden
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, rows, dim))
        self.down_proj = nn.Parameter(torch.empty(num_experts, out_dim, hidden))
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(num_experts, rows)) if bias else None
        self.down_proj_bias = nn.Parameter(torch.zeros(num_experts, out_dim)) if bias else None
        nn.init.normal_(self.gate_up_proj, 0, dim**-0.5, generator=generator)
        nn.init.normal_(self.down_proj, 0, hidden**-0.5, generator=generator)

    def forward(self, x_TD: Tensor, routing: Routing) -> Tensor:
        """(T, D) -> (T, out_dim): the weighted sum of each token's experts."""
        return grouped_ffn(
            x_TD,
            self.gate_up_proj,
            self.down_proj,
            routing.expert_ids_TK,
            routing.weights_TK,
            gate_up_bias_EH=self.gate_up_proj_bias,
            down_bias_ED=self.down_proj_bias,
            activation=self.activation,
            gated=self.gated,
            backend=self.backend,
        )

"""Dense router: every token visits every expert (K = E). Shapes: T tokens, D width, E experts."""

import torch
from torch import Tensor, nn

from shared_moe.errors import InputError
from shared_moe.routing.routing import Routing
from shared_moe.routing.topk import gate_logits


class DenseRouter(nn.Module):
    """Softmax over all experts (Jacobs et al. 1991)."""

    def __init__(self, dim: int, num_experts: int, *, generator: torch.Generator | None = None):
        super().__init__()
        if num_experts < 1:
            raise InputError(f"num_experts is {num_experts}; expected at least 1")
        self.weight = nn.Parameter(torch.empty(num_experts, dim).normal_(0, 0.02, generator=generator))

    def forward(self, x_TD: Tensor) -> Routing:
        logits_TE = gate_logits(x_TD, self.weight)
        probs_TE = logits_TE.softmax(1)
        ids_TE = torch.arange(logits_TE.shape[1], device=x_TD.device).expand_as(logits_TE)
        return Routing(ids_TE, probs_TE, probs_TE, logits_TE)

"""KERN: the router as a kernel, ReLU of l2-normalised scores (Zheng et al., ICLR 2026, arXiv 2509.25913).

    g = γ φ(norm(x W^T + b)),  KERN: φ = ReLU, norm = l2 over the experts; top-k without renormalisation

Shapes: T tokens, D width, E experts (M in the paper), K chosen.
"""

import torch
from torch import Tensor, nn

from shared_moe.errors import InputError
from shared_moe.ops.backend import choose_backend
from shared_moe.ops.topk_route import kern_gate, stable_top_k
from shared_moe.routing.routing import Routing
from shared_moe.routing.topk import check_top_k, gate_logits, runs_as_one_op

PHI = {
    "relu": torch.relu,
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "identity": lambda s: s,
}


def normalise(scores_TE: Tensor, norm: str, phi: str, eps: float) -> Tensor:
    """Divide each token's scores by their norm; with φ = exp the l1 norm is that of exp(s): s - logsumexp(s)."""
    if norm == "none":
        return scores_TE
    if norm == "l2":
        return scores_TE / (torch.linalg.vector_norm(scores_TE, dim=1, keepdim=True) + eps)
    if phi == "exp":
        return scores_TE - scores_TE.logsumexp(1, keepdim=True)
    return scores_TE / (scores_TE.abs().sum(1, keepdim=True) + eps)


class KernRouter(nn.Module):
    """The general frame g = γ φ(norm(s)): KERN by default; ("exp", "l1") is softmax, ("sigmoid", "none") sigmoid.

    norm_over="topk" takes the norm over the chosen scores only. Selection is on the normalised scores, so a negative γ
    flips the output and not the choice. A pair of weight zero is dropped from dispatch (id -1); a token whose scores
    are all <= 0 gets nothing and sends the router no gradient (`dead_token_fraction`). Weights are no distribution:
    `is_simplex` says so, and losses that need one take softmax of the logits. NaN scores make that token's weights NaN.
    Keep γ free of weight decay.
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int,
        *,
        phi: str = "relu",
        norm: str = "l2",
        norm_over: str = "all",
        eps: float = 1e-6,
        bias: bool = True,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        check_top_k(num_experts, top_k)
        if phi not in PHI or norm not in ("l2", "l1", "none") or norm_over not in ("all", "topk"):
            raise InputError(
                f"phi={phi!r}, norm={norm!r}, norm_over={norm_over!r}; expected phi of {', '.join(PHI)}, norm l2, l1 or "
                "none, norm_over all or topk"
            )
        self.top_k, self.phi, self.norm, self.norm_over, self.eps = top_k, phi, norm, norm_over, eps
        self.weight = nn.Parameter(torch.empty(num_experts, dim).normal_(0, 0.02, generator=generator))
        self.bias = nn.Parameter(torch.zeros(num_experts)) if bias else None
        self.gamma = nn.Parameter(torch.ones(()))

    @property
    def is_simplex(self) -> bool:
        """Whether the full gate row sums to one."""
        return self.phi == "exp" and self.norm == "l1" and self.norm_over == "all"

    def forward(self, x_TD: Tensor) -> Routing:
        scores_TE = gate_logits(x_TD, self.weight, self.bias)
        backend = choose_backend("topk_route")
        if (self.phi, self.norm, self.norm_over) == ("relu", "l2", "all") and runs_as_one_op(
            scores_TE, backend
        ):
            ids, weights, gates, counts = kern_gate(scores_TE, self.gamma, self.top_k, self.eps, backend)
            return Routing(ids, weights, gates, scores_TE, counts_E=counts)
        normed_TE = normalise(scores_TE, self.norm, self.phi, self.eps)
        gates_TE = self.gamma * PHI[self.phi](normed_TE)
        ids_TK = stable_top_k(normed_TE, self.top_k)
        if self.norm_over == "all":
            weights_TK = gates_TE.gather(1, ids_TK)
        else:
            chosen_TK = normalise(scores_TE.gather(1, ids_TK), self.norm, self.phi, self.eps)
            weights_TK = self.gamma * PHI[self.phi](chosen_TK)
        return Routing(torch.where(weights_TK == 0, -1, ids_TK), weights_TK, gates_TE, scores_TE)


def dead_token_fraction(routing: Routing) -> Tensor:
    """Share of tokens that no expert serves."""
    return (routing.expert_ids_TK < 0).all(1).to(torch.float32).mean()

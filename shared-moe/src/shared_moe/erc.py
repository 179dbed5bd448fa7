"""Expert-router coupling: each router row, jittered, should excite its own expert most (Lv et al., ICLR 2026,
arXiv 2512.23447).

Shapes: E experts (n in the paper), D width, F hidden width. R (E, D) router rows, W (E, F, D) the experts' first
(gate) matrices. M[i, j] = ||W_j R~_i||: row = proxy token, column = expert.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from shared_moe.errors import InputError, ShapeError


@dataclass(frozen=True)
class ERC:
    """The loss and what it says about the layer.

    loss               the hinge sum over n², to be averaged over layers and weighted (weight 1 by default)
    relative           loss over the mean of M's diagonal: comparable across scales
    norms_EE           M
    epsilon_E          noise bound of each row, half the distance to the nearest other row over its norm: the gauge of
                       specialisation
    diagonal_dominant  share of proxies whose own expert answers most
    router_norm, expert_norm   mean norms; the loss is homogeneous in both, so watch that it does not fall by shrinking
    """

    loss: Tensor
    relative: Tensor
    norms_EE: Tensor
    epsilon_E: Tensor
    diagonal_dominant: Tensor
    router_norm: Tensor
    expert_norm: Tensor


def gate_half(gate_up_E2FD: Tensor) -> Tensor:
    """The gate rows of fused storage (E, 2F, D) -> (E, F, D)."""
    return gate_up_E2FD[:, : gate_up_E2FD.shape[1] // 2]


def noise_bound(router_ED: Tensor) -> Tensor:
    """ε_i = min_{j≠i} ||R_i - R_j|| / (2 ||R_i||); 0 for a zero row, for equal rows and for a single expert."""
    E = router_ED.shape[0]
    if E < 2:
        return router_ED.new_zeros(E)
    squares = (router_ED[:, None] - router_ED[None]).square().sum(-1)
    squares = squares.masked_fill(torch.eye(E, dtype=torch.bool, device=router_ED.device), float("inf"))
    nearest = _safe_sqrt(squares.amin(1))
    norm = _safe_sqrt(router_ED.square().sum(1))
    return torch.where(norm > 0, nearest / (2 * norm.clamp_min(torch.finfo(norm.dtype).tiny)), 0)


def _safe_sqrt(squares: Tensor) -> Tensor:
    """Square root whose gradient at 0 is 0."""
    positive = squares > 0
    return torch.where(positive, squares, 1).sqrt() * positive


def erc(
    router_ED: Tensor,
    gate_EFD: Tensor,
    *,
    alpha: float = 1.0,
    noise: bool = True,
    detach_bound: bool = True,
    generator: torch.Generator | None = None,
) -> ERC:
    """(1/n²) Σ_i Σ_{j≠i} max(M_ij - α M_ii, 0) + max(M_ji - α M_ii, 0), in float32 or wider.

    alpha         how clearly the diagonal must lead: 1 only asks it to be the maximum, 0 asks orthogonality
    noise         proxies R_i ⊙ U(1 - ε_i, 1 + ε_i); False uses R itself (the paper's ablation)
    detach_bound  no gradient through ε, so that rows cannot drift apart to enlarge it

    For fused storage pass `gate_half(gate_up)`. Biases and shared experts are left out; one expert gives 0.
    Raises `ShapeError` when the shapes disagree, `InputError` for a negative alpha.
    """
    if (
        router_ED.dim() != 2
        or gate_EFD.dim() != 3
        or router_ED.shape != (gate_EFD.shape[0], gate_EFD.shape[2])
    ):
        raise ShapeError(
            f"router {tuple(router_ED.shape)} and gate {tuple(gate_EFD.shape)} must be (E, D), (E, F, D)"
        )
    if alpha < 0:
        raise InputError(f"alpha is {alpha}; expected at least 0")
    wide = torch.promote_types(torch.promote_types(router_ED.dtype, gate_EFD.dtype), torch.float32)
    with torch.autocast(router_ED.device.type, enabled=False):
        R, W = router_ED.to(wide), gate_EFD.to(wide)
        E = R.shape[0]
        epsilon = noise_bound(R)
        if noise:
            u = torch.empty_like(R).uniform_(-1, 1, generator=generator)
            bound = epsilon.detach() if detach_bound else epsilon
            proxy = R * (1 + bound[:, None] * u)
        else:
            proxy = R
        M = _safe_sqrt(torch.einsum("id,jfd->ijf", proxy, W).square().sum(-1))
        own = M.diagonal()
        excess = (M - alpha * own[:, None]).clamp_min(0) + (M.t() - alpha * own[:, None]).clamp_min(0)
        loss = (excess - torch.diag(excess.diagonal())).sum() / max(1, E * E)
        scale = own.detach().mean().clamp_min(torch.finfo(wide).tiny)
        return ERC(
            loss=loss,
            relative=loss.detach() / scale,
            norms_EE=M,
            epsilon_E=epsilon.detach(),
            diagonal_dominant=(M.argmax(1) == torch.arange(E, device=M.device)).to(wide).mean(),
            router_norm=R.detach().norm(dim=1).mean(),
            expert_norm=W.detach().flatten(1).norm(dim=1).mean(),
        )

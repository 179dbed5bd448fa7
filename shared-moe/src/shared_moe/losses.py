"""Auxiliary losses and measures of specialisation: pure functions of tensors; the caller weighs and adds them.

Shapes: T tokens, E experts, K chosen, D width, G kinds of token. The ERC loss is in `shared_moe.erc`.
"""

import torch
from torch import Tensor

from shared_moe.errors import InputError, ShapeError
from shared_moe.ops.topk_route import expert_counts


def load_balance(probs_TE: Tensor, expert_ids_TK: Tensor) -> Tensor:
    """E Σ_e f_e P_e: f the assignments a token to expert e, P its mean probability (Switch; transformers' scaling).

    Equals K under perfect balance. Raises `InputError` when the rows of probs are no distribution: for routers such as
    KERN or sigmoid pass `logits.softmax(1)`.
    """
    T, E = probs_TE.shape
    if T == 0:
        return probs_TE.sum()
    if not torch.compiler.is_compiling():
        worst = (probs_TE.detach().sum(1) - 1).abs().max().item()
        if worst > 1e-2:
            raise InputError(
                f"load_balance needs probabilities whose rows sum to 1 (worst row is off by {worst:.3g}); "
                "pass logits.softmax(1)"
            )
    share_E = expert_counts(expert_ids_TK, E).to(probs_TE.dtype) / T
    return E * (share_E * probs_TE.mean(0)).sum()


def z_loss(logits_TE: Tensor) -> Tensor:
    """Mean of logsumexp(logits)² (ST-MoE): keeps gate logits small. 0 for no tokens."""
    if logits_TE.shape[0] == 0:
        return logits_TE.sum()
    return logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32)).logsumexp(1).square().mean()


def orthogonality(rows_ED: Tensor) -> Tensor:
    """Mean squared cosine between different rows: 0 when the experts' directions are orthogonal, 1 when equal."""
    if rows_ED.dim() != 2:
        raise ShapeError(f"rows must be (E, D), got {tuple(rows_ED.shape)}")
    E = rows_ED.shape[0]
    if E < 2:
        return rows_ED.sum() * 0
    unit = torch.nn.functional.normalize(rows_ED, dim=1)
    cosines = unit @ unit.t()
    off_diagonal = cosines - torch.diag(cosines.diagonal())
    return off_diagonal.square().sum() / (E * (E - 1))


def utilisation(probs_TE: Tensor) -> Tensor:
    """Entropy of the mean gate distribution over log E: 1 when the experts are used alike, 0 when one takes all."""
    E = probs_TE.shape[1]
    if E < 2:
        return probs_TE.sum() * 0 + 1
    mean_E = probs_TE.mean(0)
    mean_E = mean_E / mean_E.sum()
    return -(mean_E * mean_E.clamp_min(torch.finfo(mean_E.dtype).tiny).log()).sum() / torch.log(
        torch.tensor(float(E))
    )


def load_max_over_mean(expert_ids_TK: Tensor, num_experts: int) -> float:
    """Largest load over mean load: 1 when balanced, E when one expert takes all; NaN without assignments."""
    counts = expert_counts(expert_ids_TK, num_experts).to(torch.float64)
    return (counts.max() / counts.mean()).item()


def dead_experts(expert_ids_TK: Tensor, num_experts: int) -> int:
    """How many experts no token visits."""
    return int((expert_counts(expert_ids_TK, num_experts) == 0).sum())


def specialisation(expert_ids_TK: Tensor, kind_T: Tensor, num_experts: int) -> float:
    """Mutual information in nats between a token's kind and the experts it visits; 0 when they are independent.

    kind_T: int64 (T,), 0 to G - 1.
    """
    if kind_T.shape != expert_ids_TK.shape[:1]:
        raise ShapeError(f"kinds {tuple(kind_T.shape)} must be ({expert_ids_TK.shape[0]},)")
    kinds = kind_T[:, None].expand_as(expert_ids_TK)
    taken = (expert_ids_TK >= 0) & (expert_ids_TK < num_experts)
    if not taken.any():
        return 0.0
    pair = kinds[taken] * num_experts + expert_ids_TK[taken]
    groups = int(kind_T.max()) + 1
    joint = torch.bincount(pair, minlength=groups * num_experts).view(groups, num_experts).double()
    joint = joint / joint.sum()
    independent = joint.sum(1, keepdim=True) * joint.sum(0, keepdim=True)
    present = joint > 0
    return (joint[present] * (joint[present] / independent[present]).log()).sum().item()

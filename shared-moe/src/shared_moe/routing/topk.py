"""Top-k routers: softmax or sigmoid gates, group-limited selection, bias balancing.

Shapes: T tokens, D width, E experts, K chosen, G groups of E / G neighbouring experts.

Non-finite logits: a NaN, or a softmax row with +inf or nothing but -inf, makes that token's weights NaN, so that the
fault shows in the output; its expert ids stay valid. An expert at -inf gets weight 0.
"""

import torch
from torch import Tensor, nn

from shared_moe.errors import InputError, ShapeError
from shared_moe.ops.backend import choose_backend
from shared_moe.ops.topk_route import chosen_weights, expert_counts, gate, stable_top_k, topk_gate
from shared_moe.routing.routing import Routing


def check_top_k(num_experts: int, top_k: int) -> None:
    if num_experts < 1 or not 1 <= top_k <= num_experts:
        raise InputError(f"top_k is {top_k} of {num_experts} experts; expected 1 <= top_k <= num_experts")


def gate_logits(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """x W^T + b in float32 or wider, also under autocast.

    Raises `ShapeError` when x is not (T, D) of the weight's width, or not floating point.
    """
    if x_TD.dim() != 2 or x_TD.shape[1] != weight_ED.shape[1] or not x_TD.is_floating_point():
        raise ShapeError(
            f"the router expects floating-point tokens (T, {weight_ED.shape[1]}), got {x_TD.dtype} {tuple(x_TD.shape)}"
        )
    wide = torch.promote_types(torch.promote_types(x_TD.dtype, weight_ED.dtype), torch.float32)
    with torch.autocast(x_TD.device.type, enabled=False):
        bias = None if bias_E is None else bias_E.to(wide)
        return nn.functional.linear(x_TD.to(wide), weight_ED.to(wide), bias)


def _keep_best_groups(scores_TE: Tensor, num_groups: int, top_k_groups: int, group_score: str) -> Tensor:
    """Scores with every expert outside the best groups at -inf."""
    T, E = scores_TE.shape
    grouped = scores_TE.view(T, num_groups, E // num_groups)
    members = 1 if group_score == "max" else min(2, E // num_groups)
    best = grouped.topk(members, dim=2).values.sum(2)
    keep = torch.zeros_like(best, dtype=torch.bool).scatter_(1, stable_top_k(best, top_k_groups), True)
    return grouped.masked_fill(~keep[:, :, None], float("-inf")).view(T, E)


def runs_as_one_op(scores_TE: Tensor, backend: str) -> bool:
    """Whether gate and choice go through the op with kernels: on a GPU, or where a kernel was asked for."""
    return backend == "triton" or (backend == "auto" and scores_TE.device.type == "cuda")


def topk_route(
    logits_TE: Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    norm_topk_prob: bool = True,
    selection_bias_E: Tensor | None = None,
    num_groups: int = 1,
    top_k_groups: int = 1,
    group_score: str = "max",
    scale: float = 1.0,
    backend: str = "auto",
) -> Routing:
    """Route each token to the `top_k` experts of highest gate value.

    scoring         softmax over the experts, or an independent sigmoid each
    norm_topk_prob  divide the chosen weights by their sum
    selection_bias  added to the gate values for the choice only, not for the weights (bias balancing, DeepSeek-V3)
    num_groups      choose only among the `top_k_groups` groups with the best `group_score`: their highest member
                    ("max", DeepSeek-V2) or the sum of their two highest ("top2", DeepSeek-V3)
    scale           factor on the weights

    Raises `InputError` for k outside 1..E or groups that do not divide the experts.
    """
    if logits_TE.dim() != 2:
        raise ShapeError(f"logits must be (T, E), got {tuple(logits_TE.shape)}")
    E = logits_TE.shape[1]
    check_top_k(E, top_k)
    if E % num_groups or not 1 <= top_k_groups <= num_groups or top_k > E // num_groups * top_k_groups:
        raise InputError(
            f"{top_k_groups} of {num_groups} groups of {E} experts cannot give {top_k} experts a token; "
            "num_groups must divide the experts and the chosen groups hold at least top_k"
        )
    if scoring not in ("softmax", "sigmoid") or group_score not in ("max", "top2"):
        raise InputError(
            f"scoring={scoring!r}, group_score={group_score!r}; expected softmax or sigmoid, max or top2"
        )
    wide_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    sigmoid = scoring == "sigmoid"
    if num_groups > 1:
        probs_TE = wide_TE.sigmoid() if sigmoid else wide_TE.softmax(1)
        choice_TE = probs_TE if selection_bias_E is None else probs_TE + selection_bias_E
        choice_TE = _keep_best_groups(choice_TE, num_groups, top_k_groups, group_score)
        ids_TK = stable_top_k(choice_TE, top_k)
        return Routing(ids_TK, chosen_weights(probs_TE, ids_TK, norm_topk_prob, scale), probs_TE, logits_TE)
    backend = choose_backend("topk_route", backend)
    if runs_as_one_op(wide_TE, backend):
        ids_TK, weights_TK, probs_TE, counts_E = topk_gate(
            wide_TE, selection_bias_E, top_k, sigmoid, norm_topk_prob, scale, backend
        )
        return Routing(ids_TK, weights_TK, probs_TE, logits_TE, counts_E=counts_E)
    ids_TK, weights_TK, probs_TE = gate(wide_TE, selection_bias_E, top_k, sigmoid, norm_topk_prob, scale)
    return Routing(ids_TK, weights_TK, probs_TE, logits_TE)


class TopKRouter(nn.Module):
    """Linear gate and top-k choice (Shazeer et al. 2017; Mixtral, OLMoE, DeepSeek).

    With `bias_balancing` a bias per expert, `expert_bias`, shifts the choice but not the weights; it moves only when
    `update_bias` is called with routings, so a recomputed forward (activation checkpointing) counts no token twice.
    """

    scoring: str = "softmax"

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int,
        *,
        norm_topk_prob: bool = True,
        num_groups: int = 1,
        top_k_groups: int = 1,
        group_score: str = "max",
        scale: float = 1.0,
        jitter: float = 0.0,
        bias_balancing: bool = False,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        check_top_k(num_experts, top_k)
        self.top_k, self.norm_topk_prob, self.scale, self.jitter = top_k, norm_topk_prob, scale, jitter
        self.num_groups, self.top_k_groups, self.group_score = num_groups, top_k_groups, group_score
        self.weight = nn.Parameter(torch.empty(num_experts, dim).normal_(0, 0.02, generator=generator))
        self.register_buffer("expert_bias", torch.zeros(num_experts) if bias_balancing else None)

    def forward(self, x_TD: Tensor, *, generator: torch.Generator | None = None) -> Routing:
        """(T, D) -> Routing. In training `jitter` scales each input by U(1 - jitter, 1 + jitter) from `generator`."""
        if self.jitter and self.training:
            noise = torch.empty_like(x_TD).uniform_(1 - self.jitter, 1 + self.jitter, generator=generator)
            x_TD = x_TD * noise
        return topk_route(
            gate_logits(x_TD, self.weight),
            self.top_k,
            scoring=self.scoring,
            norm_topk_prob=self.norm_topk_prob,
            selection_bias_E=self.expert_bias,
            num_groups=self.num_groups,
            top_k_groups=self.top_k_groups,
            group_score=self.group_score,
            scale=self.scale,
        )

    @torch.no_grad()
    def update_bias(self, *routings: Routing, rate: float = 1e-3) -> Tensor:
        """Raise the bias of experts below the mean load of these routings, lower it above; keep the mean at zero.

        Returns the tokens counted for each expert (E,). Source: loss-free balancing, DeepSeek-V3.
        Raises `InputError` when the router was built without `bias_balancing`.
        """
        if self.expert_bias is None:
            raise InputError("update_bias needs a router built with bias_balancing=True")
        counts = torch.stack([routed_counts(r) for r in routings]).sum(0).float()
        self.expert_bias += rate * torch.sign(counts.mean() - counts)
        self.expert_bias -= self.expert_bias.mean()
        return counts


class SigmoidTopKRouter(TopKRouter):
    """Independent sigmoid gates and top-k choice (DeepSeek-V3, Llama 4)."""

    scoring = "sigmoid"


def routed_counts(routing: Routing) -> Tensor:
    """Assignments of each expert (E,), as the router counted them or counted now."""
    if routing.counts_E is not None:
        return routing.counts_E
    return expert_counts(routing.expert_ids_TK, routing.num_experts)

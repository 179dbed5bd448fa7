"""What every router returns.

Shapes: T tokens, E experts, K chosen; B batch, H heads, N instances, S slots (of all experts, expert-major).
"""

from dataclasses import dataclass, field

from torch import Tensor

from shared_moe.errors import ShapeError


@dataclass(frozen=True)
class Routing:
    """Which experts each token visits, and with what weight.

    expert_ids_TK  int64; -1 = no expert in this slot
    weights_TK     combine weights, normalised or not as the router's paper says
    probs_TE       the full gate distribution, for losses and analysis
    logits_TE      what the gate distribution was made from
    losses         unweighted scalars that only the router can compute (a KL, a sparsity penalty)
    counts_E       int64, assignments of each expert, where the router counted them on the way; else None
    """

    expert_ids_TK: Tensor
    weights_TK: Tensor
    probs_TE: Tensor
    logits_TE: Tensor
    losses: dict[str, Tensor] = field(default_factory=dict)
    counts_E: Tensor | None = None

    def __post_init__(self):
        ids, weights, probs, logits = self.expert_ids_TK, self.weights_TK, self.probs_TE, self.logits_TE
        if ids.shape != weights.shape or ids.dim() != 2:
            raise ShapeError(
                f"expert_ids {tuple(ids.shape)} and weights {tuple(weights.shape)} must both be (T, K)"
            )
        if probs.shape != logits.shape or probs.dim() != 2 or probs.shape[0] != ids.shape[0]:
            raise ShapeError(
                f"probs {tuple(probs.shape)} and logits {tuple(logits.shape)} must both be (T, E), T = {ids.shape[0]}"
            )

    @property
    def num_experts(self) -> int:
        return self.probs_TE.shape[1]


@dataclass(frozen=True)
class SlotRouting:
    """How instances are mixed into slots and slots back into instances (soft MoE, MAMMOTH).

    dispatch_BHNS   each slot's column sums to 1 over the real instances
    combine_BHNS    each real instance's row sums to 1 over the slots
    """

    dispatch_BHNS: Tensor
    combine_BHNS: Tensor

    def __post_init__(self):
        if self.dispatch_BHNS.dim() != 4 or self.dispatch_BHNS.shape != self.combine_BHNS.shape:
            raise ShapeError(
                f"dispatch {tuple(self.dispatch_BHNS.shape)} and combine {tuple(self.combine_BHNS.shape)} must both be "
                "(B, H, N, S)"
            )

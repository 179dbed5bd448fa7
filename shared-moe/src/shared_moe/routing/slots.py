"""Slot routing: every slot is a softmax mixture of the instances (Soft MoE, Puigcerver et al. 2024; MAMMOTH).

Shapes: B batch, N instances, D width, H heads, P = D/H, E experts, S slots of all experts, expert-major.
"""

from typing import Literal

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from shared_moe.errors import InputError
from shared_moe.ops.slot_mix import keep_mask, slot_logits, slot_mix, slot_unmix
from shared_moe.routing.routing import SlotRouting


class SlotRouter(nn.Module):
    """Learned slots that attend to the instances; no top-k, no capacity, no balancing loss.

    norm     "layer": LayerNorm over P with a learned scale, no shift (MAMMOTH); "l2": unit slots and unit instances
             with one learned scale (Soft MoE); "none"
    scale    factor on the logits, a number or "learned"
    dropout  probability that a logit is replaced by -inf, in training
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        slots_per_expert: int,
        *,
        heads: int = 1,
        norm: Literal["layer", "l2", "none"] = "l2",
        scale: float | Literal["learned"] = 1.0,
        dropout: float = 0.0,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        if dim % heads:
            raise InputError(f"heads is {heads}, which does not divide the width {dim}")
        if not 0 <= dropout < 1:
            raise InputError(f"dropout is {dropout}; expected 0 <= dropout < 1")
        self.num_experts, self.slots_per_expert = num_experts, slots_per_expert
        self.norm, self.dropout, self.heads = norm, dropout, heads
        P, S = dim // heads, num_experts * slots_per_expert
        self.slots = nn.Parameter(_directions(heads, S, P, generator))
        self.slot_scale = nn.Parameter(torch.ones(P)) if norm == "layer" else None
        self.scale = nn.Parameter(torch.ones(())) if scale == "learned" else float(scale)

    def prototypes(self) -> Tensor:
        """The normalised slots (H, S, P)."""
        if self.norm == "layer":
            return nnf.layer_norm(self.slots, self.slots.shape[-1:], self.slot_scale)
        return nnf.normalize(self.slots, dim=-1) if self.norm == "l2" else self.slots

    def split(self, x_BND: Tensor) -> Tensor:
        """(B, N, D) -> heads (B, H, N, P), unit length under the l2 norm."""
        z_BHNP = x_BND.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return nnf.normalize(z_BHNP, dim=-1) if self.norm == "l2" else z_BHNP

    def draw_dropped(self, x_BND: Tensor, generator: torch.Generator | None = None) -> Tensor | None:
        """Which logits (B, H, N, S) this pass drops; None in evaluation."""
        if not (self.dropout and self.training):
            return None
        B, N, _ = x_BND.shape
        shape = (B, self.heads, N, self.slots.shape[1])
        return torch.rand(shape, device=x_BND.device, generator=generator) < self.dropout

    def forward(self, x_BND: Tensor, mask_BN: Tensor | None = None) -> SlotRouting:
        """The exact dispatch and combine weights, stored: for figures and small bags."""
        logits = slot_logits(self.split(x_BND), self.prototypes(), self.scale)
        keep = keep_mask(mask_BN, None)
        seen = logits if keep is None else logits.masked_fill(~keep, float("-inf"))
        combine = logits.softmax(3)
        return SlotRouting(seen.softmax(2), combine if keep is None else combine * keep)

    def mix(
        self,
        x_BND: Tensor,
        mask_BN: Tensor | None = None,
        *,
        dropped_BHNS: Tensor | None = None,
        form: str = "fused",
        chunk: int = 2048,
    ) -> Tensor:
        """Instances into slots: (B, N, D) -> (B, H, S, P), without storing the weights (see `ops.slot_mix`)."""
        z_BHNP, slots = self.split(x_BND), self.prototypes()
        if self.norm != "l2":
            return slot_mix(
                z_BHNP,
                slots,
                scale=self.scale,
                mask_BN=mask_BN,
                dropped_BHNS=dropped_BHNS,
                form=form,
                chunk=chunk,
            )
        dispatch = self.forward(x_BND, mask_BN).dispatch_BHNS
        return torch.einsum(
            "bhns,bhnp->bhsp", dispatch, x_BND.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        )

    def unmix(
        self, x_BND: Tensor, values_BHSQ: Tensor, *, dropped_BHNS: Tensor | None = None, form: str = "fused"
    ) -> Tensor:
        """Slots back into instances: values (B, H, S, Q) -> (B, N, H·Q)."""
        y = slot_unmix(
            self.split(x_BND),
            self.prototypes(),
            values_BHSQ,
            scale=self.scale,
            dropped_BHNS=dropped_BHNS,
            form=form,
        )
        return y.transpose(1, 2).flatten(2)


def _directions(heads: int, slots: int, width: int, generator: torch.Generator | None) -> Tensor:
    """Unit vectors (H, S, P): orthogonal when there is room for them, else random."""
    raw = torch.randn(heads, slots, width, generator=generator)
    if slots <= width:
        return torch.linalg.qr(raw.transpose(1, 2)).Q.transpose(1, 2).contiguous()
    return nnf.normalize(raw, dim=-1)

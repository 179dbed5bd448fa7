"""Replicas of an expert, and gradients of experts as one process would have them.

A rank's backward pass brings an expert the gradients of every rank's tokens, so they are a sum over ranks, where DDP and
FSDP average: expert gradients are divided by the number of ranks to agree with them. Replicas of an expert each saw a part
of its tokens: their gradients are added up, in the same order everywhere, so that replicas stay equal bit by bit.

Shapes: L experts of this rank.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from shared_moe.parallel.group import ExpertGroup
from shared_moe.parallel.placement import Placement


class _Share(Function):
    @staticmethod
    def forward(
        ctx: Any, group: ExpertGroup, common: list[list[int]] | None, scale: float, *weights_L: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.common, ctx.scale = group, common, scale
        return tuple(weight.view_as(weight) for weight in weights_L)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads_L: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        needed = [i for i in range(len(grads_L)) if ctx.needs_input_grad[3 + i]]
        grads = [grads_L[i] if ctx.scale == 1 else grads_L[i] * ctx.scale for i in needed]
        if ctx.common is not None:
            grads = _add_up(ctx.group, ctx.common, grads)
        found = dict(zip(needed, grads, strict=True))
        return None, None, None, *(found.get(i) for i in range(len(grads_L)))


def share(
    group: ExpertGroup, common: list[list[int]] | None, scale: float, weights_L: list[Tensor]
) -> tuple[Tensor, ...]:
    """The weights as they are; their gradients come back scaled and summed over replicas.

    common: for each rank, the slots of replicated experts that it has in common with this rank; None where no expert is
    replicated on any rank.
    """
    return _Share.apply(group, common, scale, *weights_L)


@torch.no_grad()
def copy_from_owners(group: ExpertGroup, placement: Placement, weights_L: list[Tensor]) -> None:
    """Make replicas equal: each expert's weights become those of the rank that owns it."""
    common = placement.common_slots(group.rank)
    if common is None:
        return
    here = placement.experts_of(group.rank)
    splits = [len(slots) for slots in common]
    for weight_L in weights_L:
        received = group.exchange(
            weight_L[_flat(common, weight_L.device)], splits, splits, "copy replicas"
        ).split(splits)
        for rank, (slots, part) in enumerate(zip(common, received, strict=True)):
            owned = [row for row, slot in enumerate(slots) if placement.ranks[here[slot]][0] == rank]
            weight_L[[slots[row] for row in owned]] = part[owned]


def _flat(common: list[list[int]], device: torch.device) -> Tensor:
    return torch.tensor([slot for slots in common for slot in slots], dtype=torch.int64, device=device)


def _add_up(group: ExpertGroup, common: list[list[int]], grads_L: list[Tensor]) -> list[Tensor]:
    flat_LP = torch.cat([grad.flatten(1) for grad in grads_L], dim=1)
    splits = [len(slots) for slots in common]
    send_R = _flat(common, flat_LP.device)
    received_RP = group.exchange(flat_LP[send_R], splits, splits, "gradients of replicas")
    total_LP = flat_LP.to(torch.promote_types(flat_LP.dtype, torch.float32))
    total_LP[send_R] = 0
    for slots, part in zip(common, received_RP.split(splits), strict=True):
        total_LP[slots] += part
    parts = total_LP.split([grad.flatten(1).shape[1] for grad in grads_L], dim=1)
    return [part.reshape(grad.shape).to(grad.dtype) for part, grad in zip(parts, grads_L, strict=True)]

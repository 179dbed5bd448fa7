"""Replicas of an expert, and gradients of experts as one process would have them.

A rank's backward pass brings an expert the gradients of every rank's tokens, so they are a sum over ranks, where DDP and
FSDP average: expert gradients are divided by the number of ranks to agree with them. Replicas of an expert each saw a part
of its tokens: their gradients are added up, in the same order everywhere, so that replicas stay equal bit by bit.

Shapes: L experts of this rank, U of them replicated, R rows sent, P numbers an expert.
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
        grads = [grads_L[i] for i in needed]
        if ctx.scale != 1 or ctx.common is not None:
            grads = [grad * ctx.scale for grad in grads]
        if ctx.common is not None:
            _add_up_(ctx.group, ctx.common, grads)
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
    return torch.tensor([i for part in common for i in part], dtype=torch.int64, device=device)


def _add_up_(group: ExpertGroup, common: list[list[int]], grads_L: list[Tensor]) -> None:
    """Put each replicated expert's sum over ranks, in the order of ranks, in place of this rank's part of it."""
    replicated = sorted({slot for slots in common for slot in slots})
    row_of = {slot: row for row, slot in enumerate(replicated)}
    rows = [[row_of[slot] for slot in slots] for slots in common]
    splits = [len(slots) for slots in common]
    flat_UP = torch.cat([grad[replicated].flatten(1) for grad in grads_L], dim=1)
    received_RP = group.exchange(
        flat_UP[_flat(rows, flat_UP.device)], splits, splits, "gradients of replicas"
    )
    total_UP = torch.zeros_like(flat_UP, dtype=torch.promote_types(flat_UP.dtype, torch.float32))
    for part_rows, part in zip(rows, received_RP.split(splits), strict=True):
        total_UP[part_rows] += part
    sizes = [grad[:1].numel() for grad in grads_L]
    for grad, total in zip(grads_L, total_UP.split(sizes, dim=1), strict=True):
        grad[replicated] = total.reshape(-1, *grad.shape[1:]).to(grad.dtype)

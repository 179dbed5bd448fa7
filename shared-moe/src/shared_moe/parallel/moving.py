"""Experts change ranks between two steps, with their gradients and optimizer state, and nothing else changes.

Shapes: E experts, L experts of a rank.
"""

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shared_moe.errors import InputError
from shared_moe.parallel.experts import ParallelExperts
from shared_moe.parallel.group import ExpertGroup, summary
from shared_moe.parallel.placement import Placement
from shared_moe.routing.routing import Routing
from shared_moe.routing.topk import routed_counts


def expert_load(routing: Routing, group: ExpertGroup) -> Tensor:
    """Assignments of each expert on all ranks together (E,): what `Placement.balanced` wants to know.

    `dataclasses.replace(routing, counts_E=expert_load(routing, group))` makes a router's `update_bias` balance over all
    ranks alike.
    """
    return group.sum(routed_counts(routing), "expert load")


@torch.no_grad()
def move_experts(experts: ParallelExperts, placement: Placement, optimizer: Optimizer | None = None) -> None:
    """Bring `experts` into a new placement: answers, gradients and later steps stay what they were.

    Every rank calls it with the same placement, after `optimizer.step()`. Rows come from a rank that has them, itself
    first. `optimizer` is the one that holds the experts' parameters, if there is one; its state moves where it has a
    leading row an expert. Left out while there is one, its state stays with the wrong experts. Raises `InputError` for a placement of other experts or ranks, `ParallelError` when ranks
    disagree.
    """
    group, old = experts.group, experts.placement
    parts = [part for p in experts.local.parameters() for part in _parts(p, optimizer)]
    group.agree(
        {
            "operation": "move experts",
            "layer": experts.layer,
            "placement": placement.digest,
            "tensors": summary([(list(part.shape[1:]), str(part.dtype)) for part in parts]),
        }
    )
    if (placement.num_experts, placement.world_size) != (old.num_experts, old.world_size):
        raise InputError(
            f"the new placement is for {placement.num_experts} experts on {placement.world_size} ranks; there are "
            f"{old.num_experts} on {old.world_size}"
        )
    for parameter in experts.local.parameters():
        moved = [_move(part, group, old, placement) for part in _parts(parameter, optimizer)]
        _put(parameter, optimizer, moved)
    experts.set_placement(placement)


def per_expert_state(parameter: nn.Parameter, optimizer: Optimizer | None) -> list[str]:
    """Names of an optimizer's state tensors that have a leading row an expert, sorted."""
    state = {} if optimizer is None else optimizer.state.get(parameter, {})
    return sorted(
        name
        for name, value in state.items()
        if isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == parameter.shape[0]
    )


def _parts(parameter: nn.Parameter, optimizer: Optimizer | None) -> list[Tensor]:
    """The parameter, its gradient if there is one, and its state: everything with a row an expert."""
    grad = [] if parameter.grad is None else [parameter.grad]
    state = (
        [optimizer.state[parameter][name] for name in per_expert_state(parameter, optimizer)]
        if optimizer
        else []
    )
    return [parameter.data, *grad, *state]


def _put(parameter: nn.Parameter, optimizer: Optimizer | None, parts: list[Tensor]) -> None:
    names = per_expert_state(parameter, optimizer)
    had_grad = parameter.grad is not None
    parameter.grad = None
    parameter.data = parts[0]
    if had_grad:
        parameter.grad = parts[1]
    if optimizer is not None and names:
        optimizer.state[parameter].update(zip(names, parts[-len(names) :], strict=True))


def _move(rows_L: Tensor, group: ExpertGroup, old: Placement, new: Placement) -> Tensor:
    """The rows of this rank's experts in the new placement."""
    slot_of = {e: slot for slot, e in enumerate(old.experts_of(group.rank))}
    wanted = [new.experts_of(r) for r in range(group.size)]
    send = [[slot_of[e] for e in wanted[r] if _source(old, e, r) == group.rank] for r in range(group.size)]
    mine = wanted[group.rank]
    receive = [[e for e in mine if _source(old, e, group.rank) == r] for r in range(group.size)]
    outgoing = rows_L[[slot for slots in send for slot in slots]]
    came = group.exchange(outgoing, list(map(len, send)), list(map(len, receive)), "move experts")
    row_of = {e: row for row, e in enumerate(e for experts in receive for e in experts)}
    return came[[row_of[e] for e in mine]]


def _source(old: Placement, expert: int, rank: int) -> int:
    """The rank that `rank` gets an expert from: itself if it can, else the holders take turns."""
    holders = old.ranks[expert]
    return rank if rank in holders else holders[rank % len(holders)]

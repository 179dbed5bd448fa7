"""The rest of the model beside spread-out experts: DDP, FSDP2, and a gradient norm over everything.

DDP and FSDP must leave the experts alone, whose gradients are summed and scaled already:

>>> model = parallel.ddp(model)
>>> fully_shard(block, ignored_params=parallel.expert_parameters(model))
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from shared_moe.errors import InputError
from shared_moe.parallel.experts import ParallelExperts


def parallel_layers(model: nn.Module) -> dict[str, ParallelExperts]:
    """The spread-out experts of a model by name, in the order of its modules. Raises `InputError` if there are none."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, ParallelExperts)}
    if not layers:
        raise InputError(f"{type(model).__name__} has no ParallelExperts")
    return layers


def expert_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Parameters that differ from rank to rank: pass them to `fully_shard(..., ignored_params=...)`."""
    return {p for layer in parallel_layers(model).values() for p in layer.parameters()}


def ddp(model: nn.Module, **options: Any) -> DistributedDataParallel:
    """`DistributedDataParallel(model, **options)` that leaves the experts to themselves."""
    experts = expert_parameters(model)
    names = [name for name, p in model.named_parameters(remove_duplicate=False) if p in experts]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return DistributedDataParallel(model, **options)


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scale all gradients so that the norm of the whole model's is at most `max_norm`; returns the norm before.

    The dense part may be replicated (DDP) or sharded (FSDP2). Each expert counts once, replicated or not, and every rank
    gets the same norm. Source: Pascanu et al. 2013, over ranks.
    """
    layers = parallel_layers(model).values()
    group = next(iter(layers)).group
    experts = expert_parameters(model)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    dense = [p.grad for p in model.parameters() if p not in experts and p.grad is not None]
    sharded = [g for g in dense if isinstance(g, DTensor)]
    square = _square_norm(sharded) + _square_norm([g for g in dense if not isinstance(g, DTensor)])
    owned = torch.tensor(_owned_square_norm(layers), dtype=torch.float64)
    told_WN = group.agree(
        {"operation": "clip gradients", "max_norm": max_norm}, owned.view(1).view(torch.int64).tolist()
    )
    square += told_WN[:, 0].contiguous().view(torch.float64).sum().item()
    scale = max_norm / (square**0.5 + 1e-6)
    if not scale >= 1:  # also for NaN, which then shows everywhere, as in torch
        for grad in grads:
            grad.mul_(scale)
    return torch.tensor(square**0.5)


def _square_norm(tensors: Iterable[Tensor]) -> float:
    norm = get_total_norm(list(tensors))
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item() ** 2


def _owned_square_norm(layers: Iterable[ParallelExperts]) -> float:
    """Over the experts that this rank owns: over all ranks, each expert once."""
    grads = [
        p.grad[layer.placement.owned_slots(layer.group.rank)]
        for layer in layers
        for p in layer.parameters()
        if p.grad is not None
    ]
    return _square_norm(grads)
